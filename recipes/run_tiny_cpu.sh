#!/usr/bin/env bash
# Trains a tiny model on Knights and Knaves puzzles with verl and vLLM on a CPU, drafting from history.
#   RHYME=histospec|sorted|off   drafting on (default), the sorted pipeline with drafting, or stock verl
#   SORTED_MODE=on_policy|partial   SORTED_COUPLED=0|1   of RHYME=sorted (docs/sorted.md)
#   COMPARE=1               both arms with one seed, then the comparison
#   DRY_RUN=1               print the resolved config and an estimate of its memory, and stop
#   MODEL=qwen2|llama|DIR   EPOCHS=5   PROMPTS=64   PEOPLE="2 3"   SEED=1   RUN_DIR=runs/tiny_cpu
#   MODE=sync|colocate_async|separate_async
#   more arguments are hydra overrides: bash recipes/run_tiny_cpu.sh data.train_batch_size=8
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=requirements/bootstrap.sh
[ "${SKIP_BOOTSTRAP:-0}" = 1 ] || RHYME_EXTRA=cpu source "$ROOT/requirements/bootstrap.sh"

RHYME=${RHYME:-histospec}
COMPARE=${COMPARE:-0}
DRY_RUN=${DRY_RUN:-0}
MODE=${MODE:-sync}
MODEL=${MODEL:-qwen2}
EPOCHS=${EPOCHS:-5}
PROMPTS=${PROMPTS:-64}
PEOPLE=${PEOPLE:-2 3}
SEED=${SEED:-1}
RUN_DIR=$(realpath -m "${RUN_DIR:-$ROOT/runs/tiny_cpu}")

export TINY_WORLD="$ROOT/examples/tiny_world"
[ -d "$TINY_WORLD/models/$MODEL" ] && MODEL="$TINY_WORLD/models/$MODEL"
[ -e "$MODEL/config.json" ] || { echo "run_tiny_cpu: MODEL=$MODEL is neither qwen2, llama nor a model folder" >&2; exit 2; }
export MODEL

# shellcheck source=recipes/cpu.sh
source "$ROOT/recipes/cpu.sh"

run() { # run ARM DIRECTORY [overrides]
  local arm=$1
  export ARM=$1 RUN_DIR=$2 DATA=$2/data
  shift 2
  local group=() batch=16
  case "$arm" in
    off) ;;
    histospec) group=("+rhyme=histospec" "actor_rollout_ref.rollout.custom.rhyme.poll_interval=null") ;;
    sorted)
      # shellcheck source=recipes/sorted.sh
      source "$ROOT/recipes/sorted.sh"
      resolve_sorted run_tiny_cpu || exit
      group=(
        "${SORTED_ARGS[@]}" actor_rollout_ref.rollout.custom.rhyme.poll_interval=0.05
        trainer.v1.sampler.custom_sampler.path=null
      )
      ;;
    histopipe|stream|full) echo "run_tiny_cpu: RHYME=$arm does not exist yet; use histospec, sorted or off" >&2; exit 2 ;;
    *) echo "run_tiny_cpu: RHYME=$arm is unknown; use histospec, sorted or off" >&2; exit 2 ;;
  esac
  local mode=("trainer.v1.trainer_mode=$MODE")
  [ "$arm" = sorted ] && mode=()
  [ "$MODE" = sync ] || mode+=(trainer.v1.sampler.custom_sampler.name=QuickReplayBufferAsync)
  [ "$MODE" = separate_async ] && mode+=(
    # a replica of its own, on a second logical GPU, fed through shared memory
    actor_rollout_ref.hybrid_engine=false actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node=1
    actor_rollout_ref.rollout.checkpoint_engine.backend=shm trainer.v1.separate_async.parameter_sync_step=1
    ray_kwargs.ray_init.num_gpus=2
  )
  for override in "$@"; do
    case "$override" in data.train_batch_size=*) batch=${override#*=} ;; esac
  done
  local command=(
    python -m verl.trainer.main_ppo --config-path "$ROOT/recipes/config" --config-name tiny_cpu
    "${group[@]}" "${mode[@]}" "trainer.total_epochs=$EPOCHS" "data.seed=$SEED"
    "actor_rollout_ref.rollout.seed=$SEED" "hydra.run.dir=$RUN_DIR/hydra" "$@"
  )
  if [ "$DRY_RUN" = 1 ]; then
    verl-rhyme preflight --dry-run -- "${command[@]:3}"
    return
  fi
  mkdir -p "$RUN_DIR"
  # shellcheck disable=SC2086  # PEOPLE is a list
  [ -e "$DATA/train.parquet" ] ||
    python -m examples.tiny_world.data --out "$DATA" --train "$PROMPTS" --test 64 --people $PEOPLE --seed "$SEED"
  export VERL_FILE_LOGGER_PATH="$RUN_DIR/metrics.jsonl"
  python -m verl_rhyme.observability.progress --metrics "$VERL_FILE_LOGGER_PATH" --log "$RUN_DIR/train.log" \
    --total-steps $((EPOCHS * (PROMPTS / batch))) -- "${command[@]}"
  python -m verl_rhyme.observability.report "$RUN_DIR" --arm "$arm"
}

cd "$ROOT" # for examples.*; the run itself writes below RUN_DIR only
if [ "$COMPARE" = 1 ]; then
  TOP=$RUN_DIR
  run off "$TOP/off" "$@"
  run histospec "$TOP/histospec" "$@"
  [ "$DRY_RUN" = 1 ] || python -m verl_rhyme.observability.report --compare "$TOP/off" "$TOP/histospec" --out "$TOP"
else
  run "$RHYME" "$RUN_DIR" "$@"
fi
