#!/usr/bin/env bash
# REINFORCE++ on LLaMA-3.1-8B-Instruct with Knights and Knaves (SortedRL's logic setting); one node of 8 GPUs.
#   MODEL=meta-llama/Llama-3.1-8B-Instruct   a name on the hub or a folder
#   NNODES=1   GPUS_PER_NODE=8   TP=2   PP=1   SP=1 (FSDP only)   ROLLOUT_TP=1
#   TRAIN_FILE=$DATA_DIR/kk-train.parquet   VAL_FILE=$DATA_DIR/kk-test.parquet
#   RHYME ENGINE MODE DATA_DIR RUN_DIR CKPT LOGGER SEED DRY_RUN SMOKE SKIP_PREFLIGHT SKIP_BOOTSTRAP: see recipes/common.sh
#   more arguments are hydra overrides: bash recipes/run_llama8b_logic.sh trainer.total_training_steps=20
# Values: recipes/config/llama8b_logic.yaml. Data, several nodes, comparison: recipes/README.md.
set -euo pipefail

RECIPE=llama8b_logic
MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
TRAIN_NAME=kk-train.parquet
VAL_NAME=kk-test.parquet
REWARD=examples/data/logic_reward.py
NNODES=${NNODES:-1}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
TP=${TP:-2}
SP=${SP:-1}
ROLLOUT_TP=${ROLLOUT_TP:-1}

SMOKE_MODEL=llama
SMOKE_ARGS=()

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
launch "$@"
