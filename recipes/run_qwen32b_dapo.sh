#!/usr/bin/env bash
# DAPO on Qwen2.5-32B with DAPO-Math-17k, validated on five sets of the papers; 16 nodes of 8 GPUs.
#   MODEL=Qwen/Qwen2.5-32B   a name on the hub or a folder
#   NNODES=16   GPUS_PER_NODE=8   TP=8   PP=1   SP=8 (FSDP only)   ROLLOUT_TP=4
#   TRAIN_FILE=$DATA_DIR/dapo-math-17k.parquet   VAL_FILE: files of $DATA_DIR/eval
#   RHYME ENGINE MODE DATA_DIR RUN_DIR CKPT LOGGER SEED DRY_RUN SMOKE SKIP_PREFLIGHT SKIP_BOOTSTRAP: see recipes/common.sh
#   more arguments are hydra overrides: bash recipes/run_qwen32b_dapo.sh trainer.total_training_steps=20
# Values: recipes/config/qwen32b_dapo.yaml. Data, several nodes, comparison: recipes/README.md.
set -euo pipefail

RECIPE=qwen32b_dapo
MODEL=${MODEL:-Qwen/Qwen2.5-32B}
TRAIN_NAME=dapo-math-17k.parquet
VAL_NAME=$(echo eval/{aime-2024,amc-2023,math-500,minerva,olympiad-bench}.parquet)
REWARD=examples/data/math_reward.py # for DAPO's rows it calls verl's own reward
NNODES=${NNODES:-16}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
TP=${TP:-8}
SP=${SP:-8}
ROLLOUT_TP=${ROLLOUT_TP:-4}

SMOKE_MODEL=qwen2
SMOKE_ARGS=(reward.reward_kwargs.overlong_buffer_cfg.len=32 reward.custom_reward_function.name=compute_score)

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
launch "$@"
