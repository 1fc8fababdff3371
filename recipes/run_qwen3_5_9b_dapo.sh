#!/usr/bin/env bash
# DAPO on Qwen3.5-9B, a hybrid of gated delta nets and attention, with DAPO-Math-17k; one node of 8 GPUs, FSDP2.
#   MODEL=Qwen/Qwen3.5-9B   a name on the hub or a folder
#   NNODES=1   GPUS_PER_NODE=8   SP=1 (its gated delta nets need flash-linear-attention for more)   ROLLOUT_TP=1
#   RHYME=full STALENESS=k; ENGINE=fsdp only: mbridge, which verl uses with Megatron, has no Qwen3.5
#   TRAIN_FILE=$DATA_DIR/dapo-math-17k.parquet   VAL_FILE: files of $DATA_DIR/eval
#   MODE DATA_DIR RUN_DIR CKPT LOGGER SEED DRY_RUN SMOKE SKIP_PREFLIGHT SKIP_BOOTSTRAP: see recipes/common.sh
#   more arguments are hydra overrides: bash recipes/run_qwen3_5_9b_dapo.sh trainer.total_training_steps=20
# Values: recipes/config/qwen3_5_9b_dapo.yaml. Data, several nodes, comparison: recipes/README.md.
set -euo pipefail

RECIPE=qwen3_5_9b_dapo
MODEL=${MODEL:-Qwen/Qwen3.5-9B}
RHYME=${RHYME:-full}
ENGINE=${ENGINE:-fsdp}
ENGINES=fsdp
TRAIN_NAME=dapo-math-17k.parquet
VAL_NAME=$(echo eval/{aime-2024,amc-2023,math-500,minerva,olympiad-bench}.parquet)
REWARD=examples/data/math_reward.py # for DAPO's rows it calls verl's own reward
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
TP=1 # Megatron only
SP=${SP:-1}
ROLLOUT_TP=${ROLLOUT_TP:-1}

SMOKE_MODEL=qwen2 # its tokenizer
SMOKE_MAKE=hybrid
SMOKE_ARGS=(
  reward.reward_kwargs.overlong_buffer_cfg.len=32 reward.custom_reward_function.name=compute_score
  algorithm.filter_groups.enable=false # its weights are random, and no answer is right
  +actor_rollout_ref.model.override_config.attn_implementation=sdpa # FSDP without flash-attn, in float32
  "+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
)

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
launch "$@"
