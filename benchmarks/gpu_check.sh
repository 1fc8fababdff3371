#!/usr/bin/env bash
# What a GPU is to decide, in one command: docs/studies/gpu_check.md. Started again, it goes on with the parts that are left.
#   bash benchmarks/gpu_check.sh [--quick] [--only PART] [--again] [--out FOLDER]
# PYTHON names the interpreter; it needs torch, and each part tells what else is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
