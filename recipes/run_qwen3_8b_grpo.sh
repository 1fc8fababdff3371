#!/usr/bin/env bash
# GRPO on Qwen3-8B with DAPO-Math-17k, validated on five sets of the papers; one node of 8 GPUs.
#   MODEL=Qwen/Qwen3-8B   a name on the hub or a folder
#   NNODES=1   GPUS_PER_NODE=8   TP=2   PP=1   SP=1 (FSDP only)   ROLLOUT_TP=1
#   TRAIN_FILE=$DATA_DIR/dapo-math-17k.parquet   VAL_FILE: files of $DATA_DIR/eval
#   RHYME ENGINE MODE DATA_DIR RUN_DIR CKPT LOGGER SEED DRY_RUN SMOKE SKIP_PREFLIGHT SKIP_BOOTSTRAP: see recipes/common.sh
#   more arguments are hydra overrides: bash recipes/run_qwen3_8b_grpo.sh trainer.total_training_steps=20
# Values: recipes/config/qwen3_8b_grpo.yaml. Data, several nodes, comparison: recipes/README.md.
set -euo pipefail

RECIPE=qwen3_8b_grpo
MODEL=${MODEL:-Qwen/Qwen3-8B}
TRAIN_NAME=dapo-math-17k.parquet
VAL_NAME=$(echo eval/{aime-2024,amc-2023,math-500,minerva,olympiad-bench}.parquet)
REWARD=examples/data/math_reward.py
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
TP=${TP:-2}
SP=${SP:-1}
ROLLOUT_TP=${ROLLOUT_TP:-1}

SMOKE_MODEL=qwen2
SMOKE_ARGS=()

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
launch "$@"
