#!/usr/bin/env bash
# Checks that need a GPU, in one command. A second start resumes with the remaining parts.
#   bash benchmarks/gpu_check.sh [--quick] [--only PART] [--again] [--out FOLDER]
# PYTHON names the interpreter; it needs torch. Each part reports its missing packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
