#!/usr/bin/env bash
# Trains a tiny model on Knights and Knaves puzzles, a tiny agent that searches, or a small pretrained model on language
# tasks, with verl and vLLM on a CPU. The engine drafts from the history.
#   RHYME=histospec         preset: histospec (drafting only), full (adds the pipeline), sorted, histopipe or stream
#                           (settings of the papers), off (stock verl); docs/choosing.md compares them
#   STALENESS=k             maximum staleness of a pipeline preset: policy versions between a trained token and the
#                           policy that trains on it; 0 is on-policy; default: the preset's
#   COMPARE=1               run off and histospec with one seed, then compare them
#   DRY_RUN=1               print the resolved config and the memory estimate, then stop; status 1 if the config fails
#   MODEL=qwen2|llama|agent|smollm2|DIR   EPOCHS=5   PROMPTS=64   SEED=1   (smollm2, pretrained: 3 epochs of 12 prompts)
#   WEIGHT_BUCKET_MB=64     for MODEL=DIR: at least the size of its largest tensor in megabytes
#   PEOPLE="2 3"            numbers of people in the puzzles
#   SHOTS=2                 few-shot examples per prompt for MODEL=smollm2 (examples/smollm2)
#   FROZEN=1                do not train the policy, and do not stream batches (verl's critic_warmup)
#   ENGINE=fsdp|megatron    MODE=sync|colocate_async|separate_async   (RHYME=stream: separate_async)
#   REPLICAS=1              number of engines
#   SKIP_BOOTSTRAP=1        use the active Python environment
#   RUN_DIR=runs/tiny_cpu/NAME   `verl-rhyme run-name` derives NAME from the config: histospec-qwen2-fsdp-sync,
#                           full-k2-qwen2-fsdp-separate_async-2_replicas
#   more arguments are hydra overrides: bash recipes/run_tiny_cpu.sh data.train_batch_size=8
# A second start with more EPOCHS resumes the run. The start is refused if checkpoints/run.json in RUN_DIR names another
# preset, model, engine, mode, seed, puzzle set or number of replicas.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
COMPARE=${COMPARE:-0} DRY_RUN=${DRY_RUN:-0} SKIP_BOOTSTRAP=${SKIP_BOOTSTRAP:-0}
ENGINE=${ENGINE:-fsdp}
MODEL=${MODEL:-qwen2} FROZEN=${FROZEN:-0}
WORLD=tiny_world BATCH=16
case "$MODEL" in
  agent) WORLD=agent ;;
  smollm2) WORLD=smollm2 BATCH=4 EPOCHS=${EPOCHS:-3} PROMPTS=${PROMPTS:-12} ;;
esac
EPOCHS=${EPOCHS:-5}
PROMPTS=${PROMPTS:-64}
PEOPLE=${PEOPLE:-2 3} SHOTS=${SHOTS:-2}
SEED=${SEED:-1}
REPLICAS=${REPLICAS:-1}
for _override in "$@"; do # the progress lines count its steps
  [[ ! "$_override" =~ ^data\.train_batch_size=([1-9][0-9]{0,8})$ ]] || BATCH=${BASH_REMATCH[1]}
done

# shellcheck source=recipes/settings.sh
source "$ROOT/recipes/settings.sh"
NAME=run_tiny_cpu
for _switch in COMPARE DRY_RUN FROZEN SKIP_BOOTSTRAP; do one_of "$_switch" 0 1; done
check_preset
[ "$COMPARE" = 0 ] || [ "$RHYME" = histospec ] || refuse "COMPARE=1 compares off and histospec; drop RHYME=$RHYME"
# a module of VERL_USE_EXTERNAL_MODULES may register another mode
[ -n "${VERL_USE_EXTERNAL_MODULES:-}" ] || one_of MODE sync colocate_async separate_async
[ "$MODE" != separate_async ] || { [ "$RHYME" != off ] && [ "$COMPARE" = 0 ]; } ||
  refuse "MODE=separate_async needs our relay for weights, which RHYME=off and COMPARE=1 lack; use another MODE"
one_of ENGINE fsdp megatron
[ "$WORLD $ENGINE" != "smollm2 megatron" ] ||
  refuse "MODEL=smollm2 trains with LoRA, which needs verl's FSDP engine; drop ENGINE=megatron"
number EPOCHS 1
number PROMPTS "$BATCH" "a batch of data.train_batch_size"
number SEED 0
one_of SHOTS 0 1 2 # a prompt with three is longer than tiny_cpu_world/smollm2.yaml allows
number REPLICAS 1
EPOCHS=$((10#$EPOCHS)) PROMPTS=$((10#$PROMPTS)) SEED=$((10#$SEED)) REPLICAS=$((10#$REPLICAS)) # leading zeros mean octal
[[ "$PEOPLE" =~ ^[2-7](\ [2-7])*$ ]] || refuse "PEOPLE='$PEOPLE' is not a list of numbers from 2 to 7, such as '2 3'"

export TINY_WORLD="$ROOT/examples/tiny_world"
[ ! -d "$TINY_WORLD/models/$MODEL" ] || MODEL="$TINY_WORLD/models/$MODEL"
[ "$WORLD" != agent ] || MODEL="$ROOT/examples/agent/model"
[ "$WORLD" = smollm2 ] || [ -e "$MODEL/config.json" ] ||
  refuse "MODEL=$MODEL is neither qwen2, llama, agent, smollm2 nor a model folder"
plain_path ROOT "the checkout's folder"
RUN_DIR=${RUN_DIR:+$(realpath -m "$RUN_DIR")}
plain_path RUN_DIR

if [ "$SKIP_BOOTSTRAP" != 1 ]; then
  # shellcheck source=requirements/bootstrap.sh
  RHYME_EXTRA=cpu source "$ROOT/requirements/bootstrap.sh"
fi
cd "$ROOT" # for examples.*; the run itself writes below RUN_DIR only
[ "$WORLD" != smollm2 ] || MODEL=$(python -m examples.smollm2.model)
export MODEL
# the log shows how far a start is
export VERL_LOGGING_LEVEL=${VERL_LOGGING_LEVEL:-INFO}
# shellcheck source=recipes/cpu.sh
source "$ROOT/recipes/cpu.sh"

engines=trainer.n_gpus_per_node notes=()
[ "$MODE" != separate_async ] || engines=actor_rollout_ref.rollout.n_gpus_per_node # logical GPUs
[ "$REPLICAS" = 1 ] || notes=(--note "replicas=$REPLICAS")
arguments=(
  --config-path "$ROOT/recipes/config" --config-name tiny_cpu "model_engine=${ENGINE/fsdp/dp}" "${PRESET_ARGS[@]}"
  "$engines=$REPLICAS" "trainer.total_epochs=$EPOCHS" "data.seed=$SEED" "actor_rollout_ref.rollout.seed=$SEED"
)

tasks=(--train "$PROMPTS" --test 64 --seed "$SEED")
[ "$WORLD" = tiny_world ] || arguments+=("tiny_cpu_world=$WORLD")
case "$WORLD" in
  tiny_world)
    # shellcheck disable=SC2206  # PEOPLE is a list
    tasks+=(--people $PEOPLE) about="puzzles=$PROMPTS of $PEOPLE people"
    ;;
  agent) about="puzzles=$PROMPTS questions" ;;
  smollm2) tasks+=(--shots "$SHOTS") about="puzzles=$PROMPTS tasks with $SHOTS few-shot examples" ;;
esac
if [ "$FROZEN" = 1 ]; then # until then verl trains only the critic, and GRPO has none
  arguments+=(trainer.critic_warmup=1000000 algorithm.rollout_correction.bypass_mode=true)
  notes+=(--note frozen=policy) about+=", policy frozen"
fi

run() { # run DIRECTORY [overrides]
  export RUN_DIR=$1 DATA=$1/data
  shift
  local args=("${arguments[@]}" "hydra.run.dir=$RUN_DIR/hydra" "$@")
  # metrics assume one number of request slots per run
  local notes=(--note "$about" --note "replicas=$REPLICAS")
  if [ "$DRY_RUN" = 1 ]; then
    verl-rhyme preflight --dry-run "${notes[@]}" -- "${args[@]}"
    return
  fi
  local status=0
  verl-rhyme claim --check "${notes[@]}" -- "${args[@]}" || status=$?
  case "$status" in
    0)
      hold_lock "$RUN_DIR/checkpoints"
      [ -e "$DATA/train.parquet" ] || python -m "examples.$WORLD.data" --out "$DATA" "${tasks[@]}"
      export VERL_FILE_LOGGER_PATH="$RUN_DIR/metrics.jsonl"
      python -m verl_rhyme.observability.progress --metrics "$VERL_FILE_LOGGER_PATH" --log "$RUN_DIR/train.log" \
        --total-steps $((EPOCHS * (PROMPTS / BATCH))) -- python -m verl.trainer.main_ppo "${args[@]}"
      ;;
    3) ;; # already finished: print its summary
    *) return "$status" ;;
  esac
  verl-rhyme report "$RUN_DIR"
}

if [ -z "$RUN_DIR" ]; then
  RUN_DIR=$(RUN_DIR=. DATA=. verl-rhyme run-name "${notes[@]}" -- "${arguments[@]}" "$@")
  [ "$COMPARE" = 0 ] || RUN_DIR=compare-${RUN_DIR#histospec-}
  RUN_DIR=$ROOT/runs/tiny_cpu/$RUN_DIR
fi
if [ "$COMPARE" = 1 ]; then
  TOP=$RUN_DIR
  run "$TOP/off" rhyme=off "$@"
  run "$TOP/histospec" "$@"
  [ "$DRY_RUN" = 1 ] ||
    verl-rhyme report "$TOP/histospec" "$TOP/off" --out "$TOP"
else
  run "$RUN_DIR" "$@"
fi
