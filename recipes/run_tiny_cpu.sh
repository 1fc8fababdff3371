#!/usr/bin/env bash
# Trains a tiny model on Knights and Knaves puzzles with verl and vLLM on a CPU, drafting from history.
#   RHYME=histospec|sorted|histopipe|stream|full|off   drafting on (default), the sorted pipeline with drafting, placement
#                           by predicted lengths with drafting, training beside a stream of rollout, all of them together,
#                           or stock verl
#   SORTED_MODE=on_policy|partial   SORTED_COUPLED=1|0 (on-policy)   of RHYME=sorted (docs/sorted.md)
#   STREAM_MODE=async|sync  of RHYME=stream (docs/streaming.md)
#   COMPARE=1               both arms with one seed, then the comparison
#   DRY_RUN=1               print the resolved config and an estimate of its memory, and stop; status 1 if it cannot work
#   MODEL=qwen2|llama|DIR   EPOCHS=5   PROMPTS=64   PEOPLE="2 3"   SEED=1
#   ENGINE=fsdp|megatron    MODE=sync|colocate_async|separate_async   (the first two are one to sorted, histopipe; stream
#                           and full have the last)
#   REPLICAS=1              engines
#   OBSERVE=1               measure the bubble ratio from outside the run, too, whatever the arm (docs/metrics.md); 0 not
#   SKIP_BOOTSTRAP=1        use the Python environment that is active
#   RUN_DIR=runs/tiny_cpu/ARM-MODEL-ENGINE-MODE   e.g. histospec-qwen2-fsdp-sync, sorted-partial-qwen2-fsdp-sync; with
#                           more engines than one histopipe-qwen2-fsdp-separate_async-2_replicas
#   more arguments are hydra overrides: bash recipes/run_tiny_cpu.sh data.train_batch_size=8
# Started again with more EPOCHS it resumes. A RUN_DIR of another arm, model, engine, mode, seed, of other puzzles or of
# another number of replicas is refused: checkpoints/run.json in it says whose it is.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
RHYME=${RHYME:-histospec}
COMPARE=${COMPARE:-0}
DRY_RUN=${DRY_RUN:-0}
ENGINE=${ENGINE:-fsdp}
MODEL=${MODEL:-qwen2}
EPOCHS=${EPOCHS:-5}
PROMPTS=${PROMPTS:-64}
PEOPLE=${PEOPLE:-2 3}
SEED=${SEED:-1}
REPLICAS=${REPLICAS:-1}
BATCH=16

# shellcheck source=recipes/settings.sh
source "$ROOT/recipes/settings.sh"
NAME=run_tiny_cpu
check_names
MODE=${MODE:-$(default_mode)}
for override in "$@"; do
  case "$override" in
    model_engine=dp) ENGINE=fsdp ;;
    model_engine=*) ENGINE=${override#*=} ;;
    data.train_batch_size=*) BATCH=${override#*=} ;;
  esac
done
# a mode of one's own is registered by a module of VERL_USE_EXTERNAL_MODULES
[ -n "${VERL_USE_EXTERNAL_MODULES:-}" ] || one_of MODE sync colocate_async separate_async
check_rhyme
check_overrides "$@"
one_of ENGINE fsdp megatron
one_of COMPARE 0 1
one_of DRY_RUN 0 1
[ "$COMPARE" = 0 ] || [ "$RHYME" = histospec ] || refuse "COMPARE=1 compares off and histospec; drop RHYME=$RHYME"
[[ "$MODE" != separate_async || ("$RHYME" != off && "$COMPARE" = 0) ]] ||
  refuse "MODE=separate_async needs rhyme here: on a CPU weights go by its relay; use another MODE for RHYME=off or COMPARE=1"
[[ "$BATCH" =~ ^[1-9][0-9]{0,8}$ ]] || refuse "data.train_batch_size=$BATCH is no number of prompts"
number EPOCHS 1
number PROMPTS "$BATCH" "a batch of data.train_batch_size"
number SEED 0
number REPLICAS 1
EPOCHS=$((10#$EPOCHS)) PROMPTS=$((10#$PROMPTS)) SEED=$((10#$SEED)) REPLICAS=$((10#$REPLICAS)) # with zeros in front bash takes them for octal
[[ "$PEOPLE" =~ ^[2-7](\ [2-7])*$ ]] || refuse "PEOPLE='$PEOPLE' is no list of numbers from 2 to 7, as in PEOPLE='2 3'"

export TINY_WORLD="$ROOT/examples/tiny_world"
model_name=$(basename "$MODEL")
[ -d "$TINY_WORLD/models/$MODEL" ] && MODEL="$TINY_WORLD/models/$MODEL"
[ -e "$MODEL/config.json" ] || refuse "MODEL=$MODEL is neither qwen2, llama nor a model folder"
export MODEL
arm=$(arm_name)
[ "$COMPARE" = 1 ] && arm=compare
several=
[ "$REPLICAS" = 1 ] || several=-${REPLICAS}_replicas
RUN_DIR=$(realpath -m "${RUN_DIR:-$ROOT/runs/tiny_cpu/$arm-$model_name-$ENGINE-$MODE$several}")
plain_path ROOT "the checkout's folder"
plain_path RUN_DIR

if [ "${SKIP_BOOTSTRAP:-0}" != 1 ]; then
  # shellcheck source=requirements/bootstrap.sh
  RHYME_EXTRA=cpu source "$ROOT/requirements/bootstrap.sh"
fi
# the progress lines read verl's log
export VERL_LOGGING_LEVEL=${VERL_LOGGING_LEVEL:-INFO}
# shellcheck source=recipes/cpu.sh
source "$ROOT/recipes/cpu.sh"
WEIGHT_BUCKET_MB=${WEIGHT_BUCKET_MB:-$(python -m verl_rhyme.weight_bucket "$MODEL")}
export WEIGHT_BUCKET_MB

run() { # run RHYME DIRECTORY [overrides]
  local RHYME=$1
  check_rhyme
  ARM=$(arm_name)
  export ARM RUN_DIR=$2 DATA=$2/data
  shift 2
  local group=("${RHYME_ARGS[@]}")
  case "$RHYME" in
    histospec) group+=(actor_rollout_ref.rollout.custom.rhyme.poll_interval=null) ;;
    sorted | histopipe | stream | full)
      group+=(actor_rollout_ref.rollout.custom.rhyme.poll_interval=0.05 trainer.v1.sampler.custom_sampler.path=null)
      ;;
  esac
  [ "$ENGINE" = fsdp ] || group+=("model_engine=$ENGINE") # again in "$@", it is the same
  local mode=("trainer.v1.trainer_mode=$MODE")
  local ours=0
  pipelined && ours=1
  [ "$ours-$MODE" = 1-sync ] && mode=() # +rhyme=sorted and histopipe name their own
  [ "$ours" = 1 ] || [ "$MODE" = sync ] ||
    mode+=(trainer.v1.sampler.custom_sampler.name=QuickReplayBufferAsync)
  if [ "$MODE" = separate_async ]; then
    mode+=( # replicas of their own, each on a further logical GPU, fed through shared memory
      actor_rollout_ref.hybrid_engine=false actor_rollout_ref.rollout.nnodes=1
      "actor_rollout_ref.rollout.n_gpus_per_node=$REPLICAS" actor_rollout_ref.rollout.checkpoint_engine.backend=relay
      trainer.v1.separate_async.parameter_sync_step=1 "ray_kwargs.ray_init.num_gpus=$((REPLICAS + 1))"
    )
  elif [ "$REPLICAS" != 1 ]; then
    mode+=("trainer.n_gpus_per_node=$REPLICAS")
  fi
  observable "$RUN_DIR"
  local command=(
    python -m verl.trainer.main_ppo --config-path "$ROOT/recipes/config" --config-name tiny_cpu
    "${group[@]}" "${mode[@]}" "trainer.total_epochs=$EPOCHS" "data.seed=$SEED"
    "actor_rollout_ref.rollout.seed=$SEED" "hydra.run.dir=$RUN_DIR/hydra" "${OBSERVE_ARGS[@]}" "$@"
  )
  # a run's metrics have one number of request slots
  local notes=(--note "puzzles=$PROMPTS of $PEOPLE people" --note "replicas=$REPLICAS")
  if [ "$DRY_RUN" = 1 ]; then
    verl-rhyme preflight --dry-run "${notes[@]}" -- "${command[@]:3}"
    return
  fi
  local status=0
  verl-rhyme claim --check "${notes[@]}" -- "${command[@]:3}" || status=$?
  case "$status" in
    0)
      # shellcheck disable=SC2086  # PEOPLE is a list
      [ -e "$DATA/train.parquet" ] ||
        python -m examples.tiny_world.data --out "$DATA" --train "$PROMPTS" --test 64 --people $PEOPLE --seed "$SEED"
      export VERL_FILE_LOGGER_PATH="$RUN_DIR/metrics.jsonl"
      observed "$RUN_DIR" \
        python -m verl_rhyme.observability.progress --metrics "$VERL_FILE_LOGGER_PATH" --log "$RUN_DIR/train.log" \
        --total-steps $((EPOCHS * (PROMPTS / BATCH))) -- "${command[@]}"
      ;;
    3) ;; # already finished: its summary is shown
    *) return "$status" ;;
  esac
  python -m verl_rhyme.observability.report "$RUN_DIR"
}

cd "$ROOT" # for examples.*; the run itself writes below RUN_DIR only
if [ "$COMPARE" = 1 ]; then
  TOP=$RUN_DIR
  run off "$TOP/off" "$@"
  run histospec "$TOP/histospec" "$@"
  [ "$DRY_RUN" = 1 ] ||
    python -m verl_rhyme.observability.report "$TOP/histospec" "$TOP/off" --out "$TOP"
else
  run "$RHYME" "$RUN_DIR" "$@"
fi
