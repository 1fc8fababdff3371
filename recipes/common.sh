# shellcheck shell=bash
# Shared code of the GPU recipes. A recipe sets RECIPE (its YAML in config/) and its defaults, sources this file and
# calls `launch "$@"`. Each recipe also reads these variables:
#   RHYME=histospec              preset: histospec (drafting only), full (adds the pipeline), sorted, histopipe, stream
#                                (settings of the papers), off (stock verl); docs/choosing.md compares them
#   STALENESS=k                  maximum staleness of a pipeline preset: policy versions between a trained token and the
#                                policy that trains on it; 0 is on-policy; default: the preset's
#   ENGINE=megatron|fsdp         training engine: Megatron with TP and PP (default), or FSDP2 with SP (Ulysses)
#   MODE=sync|colocate_async|separate_async   verl's trainer mode (default: sync; RHYME=stream: separate_async).
#                                separate_async adds ROLLOUT_NNODES=1 nodes of ROLLOUT_GPUS_PER_NODE=$GPUS_PER_NODE for
#                                rollout to the NNODES for training. The pipeline treats the other two modes alike
#   DATA_DIR=data TRAIN_FILE= VAL_FILE=       parquet files; a list is [a,b]
#   RUN_DIR=runs/RECIPE/NAME     logs and metrics.jsonl; on storage that all nodes share. `verl-rhyme run-name` derives
#                                NAME from the config: full-k2-Qwen3-8B-megatron-separate_async
#   CKPT=$RUN_DIR/checkpoints    checkpoints, history snapshots, event log. A second start resumes from this folder; if
#                                its run.json names another run, the start is refused
#   LOGGER=console,file          verl's loggers: also wandb, tensorboard, mlflow, swanlab ...
#   SEED=1                       order of the data and sampling
#   DRY_RUN=1                    print the resolved config and the memory estimate, then stop; status 1 if the config
#                                fails on every machine
#   SMOKE=1                      test: two steps on this machine's CPU with a tiny model of the recipe's family, puzzles
#                                as data and small sizes
#   SKIP_PREFLIGHT=1             start without the checks of `verl-rhyme preflight`
#   SKIP_BOOTSTRAP=1             use the active Python environment instead of .venv-gpu (SMOKE=1: .venv-cpu)

_absolute() { # Ray's workers have another working directory; lists, URLs and hub names stay unchanged
  case "$1" in
    \[* | *://*) echo "$1" ;;
    *) realpath -m -- "$1" ;;
  esac
}

_files() { # _files "NAME NAME": paths in DATA_DIR; several become a hydra list
  local name list=
  for name in $1; do list+=",$DATA_DIR/$name"; done
  [[ "$1" != *" "* ]] && echo "${list#,}" || echo "[${list#,}]"
}

_check_paths() { # _check_paths VARIABLE...
  local path
  for path in "$@"; do
    [[ "$path=${!path}" == *_FILE=\[* ]] || plain_path "$path" # a list is hydra's own syntax
  done
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=recipes/settings.sh
source "$ROOT/recipes/settings.sh"
# shellcheck disable=SC2034  # read by settings.sh
NAME=$RECIPE
ENGINE=${ENGINE:-megatron}
DRY_RUN=${DRY_RUN:-0} SMOKE=${SMOKE:-0} SKIP_PREFLIGHT=${SKIP_PREFLIGHT:-0} SKIP_BOOTSTRAP=${SKIP_BOOTSTRAP:-0}
for _switch in DRY_RUN SMOKE SKIP_PREFLIGHT SKIP_BOOTSTRAP; do one_of "$_switch" 0 1; done
check_preset
one_of MODE sync colocate_async separate_async
# shellcheck disable=SC2086  # one word per engine
one_of ENGINE ${ENGINES:-megatron fsdp}
RUN_DIR=${RUN_DIR:-} _runs=$ROOT/runs/$RECIPE
if [ "$SMOKE" = 1 ]; then
  NNODES=1 GPUS_PER_NODE=1 TP=1 PP=1 SP=1 ROLLOUT_TP=1 ROLLOUT_NNODES=1 ROLLOUT_GPUS_PER_NODE=1
  MODEL=$ROOT/examples/tiny_world/models/$SMOKE_MODEL REWARD=examples/tiny_world/reward.py
  RHYME_EXTRA=${RHYME_EXTRA:-cpu} _runs+=/smoke
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
[ ! -d "$MODEL" ] || MODEL=$(_absolute "$MODEL")
[ -z "$RUN_DIR" ] || RUN_DIR=$(_absolute "$RUN_DIR")
plain_path ROOT "the checkout's folder"
_check_paths DATA_DIR TRAIN_FILE VAL_FILE MODEL RUN_DIR

# arguments that do not depend on the run's folder
_args=(
  --config-path "$ROOT/recipes/config" --config-name "$RECIPE" "backend=$ENGINE" "${PRESET_ARGS[@]}"
  "actor_rollout_ref.model.path=$MODEL" "data.train_files=$TRAIN_FILE" "data.val_files=$VAL_FILE"
  "data.seed=$SEED" "actor_rollout_ref.rollout.seed=$SEED"
  "actor_rollout_ref.rollout.tensor_model_parallel_size=$ROLLOUT_TP"
  "trainer.nnodes=$NNODES" "trainer.n_gpus_per_node=$GPUS_PER_NODE" "trainer.logger=[${LOGGER:-console,file}]"
)
[ -z "${REWARD:-}" ] || _args+=("reward.custom_reward_function.path=$ROOT/$REWARD")
[ "$MODE" != separate_async ] || _args+=(
  "actor_rollout_ref.rollout.nnodes=$ROLLOUT_NNODES"
  "actor_rollout_ref.rollout.n_gpus_per_node=$ROLLOUT_GPUS_PER_NODE"
)
case "$ENGINE" in
  megatron)
    _engine=actor_rollout_ref.actor.megatron
    _args+=("$_engine.tensor_model_parallel_size=$TP" "$_engine.pipeline_model_parallel_size=$PP")
    ;;
  fsdp)
    RHYME_BUILD=${RHYME_BUILD:-flash-attn} # Megatron needs Transformer Engine as well, the default
    _engine=actor_rollout_ref.actor.fsdp_config
    _args+=("$_engine.ulysses_sequence_parallel_size=$SP")
    ;;
esac
[ "$SMOKE" = 0 ] || _args+=( # offloading needs pinned memory, and so CUDA
  +platform=cpu +smoke=tiny "${SMOKE_ARGS[@]}" "$_engine.param_offload=false" "$_engine.optimizer_offload=false"
)

_train() {
  SKIP_PREFLIGHT=1 python -m verl.trainer.main_ppo "$@" 2>&1 | tee -a "$RUN_DIR/train.log"
}

_in_folder() { # sets RUN_DIR if unset, and FOLDER_ARGS: the arguments with paths in RUN_DIR
  RUN_DIR=${RUN_DIR:-$_runs/$(verl-rhyme run-name -- "${_args[@]}" "$@")}
  CKPT=$(_absolute "${CKPT:-$RUN_DIR/checkpoints}")
  _check_paths CKPT
  FOLDER_ARGS=(
    "trainer.default_local_dir=$CKPT" "hydra.run.dir=$RUN_DIR/hydra"
    # verl logs from a Ray worker, which may be on another node and does not inherit this shell's environment
    "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH=$RUN_DIR/metrics.jsonl"
  )
  [ "$SMOKE" = 0 ] || FOLDER_ARGS+=(
    "actor_rollout_ref.model.path=$RUN_DIR/model"
    "data.train_files=$RUN_DIR/data/train.parquet" "data.val_files=$RUN_DIR/data/test.parquet"
  )
}

launch() { # launch [hydra overrides]
  if [ "$SKIP_BOOTSTRAP" != 1 ]; then
    [ "$DRY_RUN" != 1 ] || RHYME_BUILD=0
    # shellcheck source=requirements/bootstrap.sh
    source "$ROOT/requirements/bootstrap.sh"
  fi
  if [ "$SMOKE" = 1 ]; then
    # shellcheck source=recipes/cpu.sh
    source "$ROOT/recipes/cpu.sh"
  fi
  _in_folder "$@"
  local args=("${_args[@]}" "${FOLDER_ARGS[@]}" "$@")
  if [ "$DRY_RUN" = 1 ]; then
    verl-rhyme preflight --dry-run -- "${args[@]}"
    return
  fi
  echo "$RECIPE: RHYME=$RHYME MODE=$MODE ENGINE=$ENGINE in $RUN_DIR; docs/choosing.md compares the presets" >&2
  if [ "$SMOKE" = 1 ]; then
    mkdir -p "$RUN_DIR"
    (
      cd "$ROOT" || exit # for examples.*
      [ -e "$RUN_DIR/data/train.parquet" ] ||
        python -m examples.tiny_world.data --out "$RUN_DIR/data" --train 64 --test 8 --seed "$SEED"
      [ -e "$RUN_DIR/model" ] || python -m "examples.tiny_world.${SMOKE_MAKE:-untie}" "$MODEL" "$RUN_DIR/model"
    )
  fi
  if [ "$SKIP_PREFLIGHT" != 1 ]; then
    verl-rhyme preflight -- "${args[@]}" || {
      echo "$RECIPE: not started because of the errors above; SKIP_PREFLIGHT=1 starts the run anyway" >&2
      return 1
    }
  fi
  local status=0
  verl-rhyme claim -- "${args[@]}" || status=$?
  case "$status" in
    0) ;;
    3) return 0 ;; # the run is already finished; claim printed that
    *) return "$status" ;;
  esac
  hold_lock "$CKPT"
  mkdir -p "$RUN_DIR"
  _train "${args[@]}"
  echo "$RECIPE: finished. $RUN_DIR/metrics.jsonl has timing_s/gen, timing_s/step, perf/throughput," \
    "response_length/mean, critic/score/mean, rollout/spec_accept_rate, rollout/spec_accept_length and" \
    "rollout/history/hit_rate. Summary: verl-rhyme report $RUN_DIR"
}
