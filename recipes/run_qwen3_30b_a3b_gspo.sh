#!/usr/bin/env bash
# GSPO on Qwen3-30B-A3B-Base, a mixture of 128 experts, with DAPO-Math-17k; two nodes of 8 GPUs.
#   MODEL=Qwen/Qwen3-30B-A3B-Base   a name on the hub or a folder
#   NNODES=2   GPUS_PER_NODE=8   TP=2   PP=1   SP=4 (FSDP only)   ROLLOUT_TP=4, over which the experts are divided
#   RHYME=full STALENESS=1 adds the pipeline; STALENESS is the dial between speed and age of the policy
#   TRAIN_FILE=$DATA_DIR/dapo-math-17k.parquet   VAL_FILE: files of $DATA_DIR/eval
#   RHYME ENGINE MODE DATA_DIR RUN_DIR CKPT LOGGER SEED DRY_RUN SMOKE SKIP_PREFLIGHT SKIP_BOOTSTRAP: see recipes/common.sh
#   more arguments are hydra overrides: actor_rollout_ref.actor.megatron.expert_model_parallel_size=16
# Values: recipes/config/qwen3_30b_a3b_gspo.yaml. Data, several nodes, comparison: recipes/README.md.
set -euo pipefail

RECIPE=qwen3_30b_a3b_gspo
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B-Base}
TRAIN_NAME=dapo-math-17k.parquet
VAL_NAME=$(echo eval/{aime-2024,amc-2023,math-500,minerva,olympiad-bench}.parquet)
REWARD=examples/data/math_reward.py # for DAPO's rows it calls verl's own reward
NNODES=${NNODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
TP=${TP:-2}
SP=${SP:-4}
ROLLOUT_TP=${ROLLOUT_TP:-4}

SMOKE_MODEL=qwen2 # its tokenizer
SMOKE_MAKE=mixture
SMOKE_ARGS=(
  reward.reward_kwargs.overlong_buffer_cfg.len=32 reward.custom_reward_function.name=compute_score
)
if [ "${ENGINE:-megatron}" = fsdp ]; then
  SMOKE_ARGS+=( # without flash-attn, in float32
    +actor_rollout_ref.model.override_config.attn_implementation=sdpa
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
  )
else
  SMOKE_ARGS+=(actor_rollout_ref.actor.megatron.expert_model_parallel_size=1)
fi

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
launch "$@"
