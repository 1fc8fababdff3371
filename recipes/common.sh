# shellcheck shell=bash
# What the recipes for GPUs share. A recipe sets RECIPE (its YAML in config/) and its own defaults, sources this file
# and calls `launch "$@"`. Variables of every recipe, beside those in its own header:
#   RHYME=histospec|sorted|histopipe|stream|full|off   drafting on (default), the sorted pipeline with drafting, placement
#                                by predicted lengths with drafting, training beside a stream of rollout, all of them
#                                together, or stock verl
#   SORTED_MODE=on_policy|partial   SORTED_COUPLED=1|0 (on-policy)   of RHYME=sorted: docs/sorted.md
#   STREAM_MODE=async|sync       of RHYME=stream: docs/streaming.md
#   ENGINE=megatron|fsdp         training engine: Megatron split by TP and PP (default), or FSDP2 split by SP (Ulysses)
#   MODE=sync|colocate_async|separate_async   verl's trainer mode; the last adds ROLLOUT_NNODES=1 nodes of
#                                ROLLOUT_GPUS_PER_NODE=$GPUS_PER_NODE for rollout to the NNODES that train. RHYME=sorted
#                                takes all three: the first two are one to it, in the last engines run on while it trains;
#                                RHYME=stream and full have the last
#   DATA_DIR=data TRAIN_FILE= VAL_FILE=       parquet files; a list is [a,b]
#   RUN_DIR=runs/RECIPE/ARM-ENGINE-MODE   logs and metrics.jsonl; on storage that all nodes share
#   CKPT=$RUN_DIR/checkpoints    checkpoints, history snapshots, event log; a second start resumes from here, unless
#                                run.json in it says that they are another run's
#   LOGGER=console,file          verl's loggers: also wandb, tensorboard, mlflow, swanlab ...
#   OBSERVE=1                    measure the bubble ratio from outside the run, too, whatever the arm (docs/metrics.md)
#   SEED=1                       order of the data and sampling
#   DRY_RUN=1                    print the resolved config and the memory estimate, and stop; status 1 if the config
#                                cannot work, whatever the machine
#   SMOKE=1                      two steps of the recipe on this machine's CPU, with a tiny model of the recipe's family,
#                                puzzles for data and small sizes: does everything it names work together?
#   SKIP_PREFLIGHT=1             start without the checks of `verl-rhyme preflight`
#   SKIP_BOOTSTRAP=1             use the Python environment that is active instead of making .venv-gpu (SMOKE=1: .venv-cpu)

_absolute() { # Ray's workers have another working directory; lists, URLs and names on a hub stay
  case "$1" in
    \[* | *://*) echo "$1" ;;
    *) realpath -m -- "$1" ;;
  esac
}

_files() { # _files "NAME NAME": in DATA_DIR; several are a list of hydra's
  local name list=
  for name in $1; do list+=",$DATA_DIR/$name"; done
  [[ "$1" != *" "* ]] && echo "${list#,}" || echo "[${list#,}]"
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=recipes/settings.sh
source "$ROOT/recipes/settings.sh"
# shellcheck disable=SC2034  # read by settings.sh
NAME=$RECIPE
check_names
RHYME=${RHYME:-histospec}
ENGINE=${ENGINE:-megatron}
MODE=${MODE:-$(default_mode)}
DRY_RUN=${DRY_RUN:-0} SMOKE=${SMOKE:-0} SKIP_PREFLIGHT=${SKIP_PREFLIGHT:-0} SKIP_BOOTSTRAP=${SKIP_BOOTSTRAP:-0}
for _switch in DRY_RUN SMOKE SKIP_PREFLIGHT SKIP_BOOTSTRAP; do one_of "$_switch" 0 1; done
one_of MODE sync colocate_async separate_async
check_rhyme
one_of ENGINE megatron fsdp
_arm=$(arm_name)
_run=$_arm-$ENGINE-$MODE
[[ ! "$RHYME-$MODE" =~ ^(sorted|histopipe)-sync$ ]] || MODE=rhyme_sorted
if [ "$SMOKE" = 1 ]; then
  NNODES=1 GPUS_PER_NODE=1 TP=1 PP=1 SP=1 ROLLOUT_TP=1 ROLLOUT_NNODES=1 ROLLOUT_GPUS_PER_NODE=1
  RUN_DIR=${RUN_DIR:-$ROOT/runs/$RECIPE/smoke-$_run}
  MODEL=$RUN_DIR/model REWARD=examples/tiny_world/reward.py
  DATA_DIR=$RUN_DIR/data TRAIN_FILE=$RUN_DIR/data/train.parquet VAL_FILE=$RUN_DIR/data/test.parquet
  RHYME_EXTRA=${RHYME_EXTRA:-cpu}
fi
PP=${PP:-1}
SP=${SP:-1}
SEED=${SEED:-1}
ROLLOUT_NNODES=${ROLLOUT_NNODES:-1}
ROLLOUT_GPUS_PER_NODE=${ROLLOUT_GPUS_PER_NODE:-$GPUS_PER_NODE}
for _count in NNODES GPUS_PER_NODE TP PP SP ROLLOUT_TP ROLLOUT_NNODES ROLLOUT_GPUS_PER_NODE; do number "$_count" 1; done
number SEED 0
DATA_DIR=$(_absolute "${DATA_DIR:-$ROOT/data}")
TRAIN_FILE=$(_absolute "${TRAIN_FILE:-$DATA_DIR/$TRAIN_NAME}")
VAL_FILE=$(_absolute "${VAL_FILE:-$(_files "$VAL_NAME")}")
RUN_DIR=$(_absolute "${RUN_DIR:-$ROOT/runs/$RECIPE/$_run}")
CKPT=$(_absolute "${CKPT:-$RUN_DIR/checkpoints}")
LOGGER=${LOGGER:-console,file}
[ "$SMOKE" = 1 ] || [ -d "$MODEL" ] && MODEL=$(_absolute "$MODEL")
plain_path ROOT "the checkout's folder"
for _path in RUN_DIR CKPT DATA_DIR TRAIN_FILE VAL_FILE MODEL; do
  [[ "$_path=${!_path}" == *_FILE=\[* ]] || plain_path "$_path" # a list is hydra's own syntax
done

_args=(
  --config-path "$ROOT/recipes/config" --config-name "$RECIPE" "backend=$ENGINE"
  "actor_rollout_ref.model.path=$MODEL" "data.train_files=$TRAIN_FILE" "data.val_files=$VAL_FILE"
  "data.seed=$SEED" "actor_rollout_ref.rollout.seed=$SEED"
  "actor_rollout_ref.rollout.tensor_model_parallel_size=$ROLLOUT_TP"
  "trainer.nnodes=$NNODES" "trainer.n_gpus_per_node=$GPUS_PER_NODE"
  "trainer.logger=[$LOGGER]" "trainer.experiment_name=$_arm" "trainer.default_local_dir=$CKPT"
  "hydra.run.dir=$RUN_DIR/hydra"
  # verl logs from a Ray worker, perhaps on another node: it does not see this shell's environment
  "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH=$RUN_DIR/metrics.jsonl"
)
observable "$RUN_DIR"
_args+=("${OBSERVE_ARGS[@]}")
[ -z "${REWARD:-}" ] || _args+=("reward.custom_reward_function.path=$ROOT/$REWARD")

_args+=("rhyme=$RHYME" "${RHYME_ARGS[@]:1}") # the recipes' YAML names one
case "$ENGINE" in
  megatron)
    _args+=(
      "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP"
      "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=$PP"
    )
    ;;
  fsdp)
    RHYME_BUILD=${RHYME_BUILD:-flash-attn} # Megatron needs Transformer Engine as well, the default
    _args+=("actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=$SP")
    ;;
esac
if [ "$SMOKE" = 1 ]; then
  _args+=(+platform=cpu +smoke=tiny "${SMOKE_ARGS[@]}")
  case "$ENGINE" in # pinned memory, which offloading wants, is CUDA's
    megatron) _offload=actor_rollout_ref.actor.megatron ;;
    fsdp) _offload=actor_rollout_ref.actor.fsdp_config ;;
  esac
  _args+=("$_offload.param_offload=false" "$_offload.optimizer_offload=false")
fi
_args+=("trainer.v1.trainer_mode=$MODE")
if [ "$MODE" = separate_async ]; then
  _args+=(
    "actor_rollout_ref.rollout.nnodes=$ROLLOUT_NNODES"
    "actor_rollout_ref.rollout.n_gpus_per_node=$ROLLOUT_GPUS_PER_NODE"
  )
  case "$RHYME-$SMOKE" in # of full each replica takes weights by itself; on a CPU, to a second logical GPU, all do
    *-1) _args+=(actor_rollout_ref.rollout.checkpoint_engine.backend=relay ray_kwargs.ray_init.num_gpus=2) ;;
    full-*) ;;
    *) _args+=(actor_rollout_ref.rollout.checkpoint_engine.backend=nccl) ;;
  esac
  # all engines are the pool's, and a version is an update batch
  ! pipelined ||
    _args+=(actor_rollout_ref.hybrid_engine=false trainer.v1.separate_async.parameter_sync_step=1)
fi

_train() {
  python -m verl.trainer.main_ppo "$@" 2>&1 | tee -a "$RUN_DIR/train.log"
}

launch() { # launch [hydra overrides]
  check_overrides "$@"
  local args=("${_args[@]}" "$@")
  {
    tell_systems
    echo "  sizes that a system changes: recipes/config/${RECIPE}_rhyme; docs/choosing.md says which is for which run"
  } >&2
  if [ "$SKIP_BOOTSTRAP" != 1 ]; then
    [ "$DRY_RUN" != 1 ] || RHYME_BUILD=0
    # shellcheck source=requirements/bootstrap.sh
    source "$ROOT/requirements/bootstrap.sh"
  fi
  if [ "$SMOKE" = 1 ]; then
    # shellcheck source=recipes/cpu.sh
    source "$ROOT/recipes/cpu.sh"
  fi
  if [ "$DRY_RUN" = 1 ]; then
    verl-rhyme preflight --dry-run -- "${args[@]}"
    return
  fi
  if [ "$SMOKE" = 1 ]; then
    mkdir -p "$RUN_DIR"
    (
      cd "$ROOT" || exit # for examples.*
      [ -e "$TRAIN_FILE" ] || python -m examples.tiny_world.data --out "$DATA_DIR" --train 64 --test 8 --seed "$SEED"
      [ -e "$MODEL" ] || python -m examples.tiny_world.untie "examples/tiny_world/models/$SMOKE_MODEL" "$MODEL"
    )
  fi
  if [ "$SKIP_PREFLIGHT" != 1 ]; then
    verl-rhyme preflight -- "${args[@]}" || {
      echo "$RECIPE: not started, see above; SKIP_PREFLIGHT=1 starts regardless" >&2
      return 1
    }
  fi
  local status=0
  verl-rhyme claim -- "${args[@]}" || status=$?
  case "$status" in
    0) ;;
    3) return 0 ;; # already finished, as it says
    *) return "$status" ;;
  esac
  mkdir -p "$RUN_DIR"
  observed "$RUN_DIR" _train "${args[@]}"
  echo "$RECIPE: done. In $RUN_DIR/metrics.jsonl read timing_s/gen and timing_s/step, perf/throughput," \
    "response_length/mean, critic/score/mean, rollout/spec_accept_rate, rollout/spec_accept_length," \
    "rollout/history/hit_rate; or: verl-rhyme report $RUN_DIR"
}
