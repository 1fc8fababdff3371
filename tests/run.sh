#!/usr/bin/env bash
# Runs the linters and the tests; makes .venv-cpu first when it is missing.
#   bash tests/run.sh                      everything, as CI runs it
#   bash tests/run.sh fast                 linters, unit and contract tests, but for those marked slow
#   bash tests/run.sh tests/unit -k store  arguments go to pytest, without the linters
#   RHYME_SLOW=1          also what takes hours, or fails rarely: weekly, and before a release
#   RHYME_EXTRA=cpu|gpu   which environment (default: cpu on every machine, with GPUs or without, for the tests run the
#                         engine on a CPU); gpu: unit and contract tests on the CUDA build of vLLM, no GPU needed
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
RHYME_EXTRA=${RHYME_EXTRA:-cpu} RHYME_BUILD=${RHYME_BUILD:-0}
# shellcheck source=requirements/bootstrap.sh
source "$ROOT/requirements/bootstrap.sh"
cd "$ROOT"

# Threads of one process would wait at every operation for the cores that the others have.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} VERL_PLATFORM=${VERL_PLATFORM:-cpu} RAY_USAGE_STATS_ENABLED=0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

if [ $# -gt 0 ] && [ "$*" != fast ]; then
  exec python -m pytest "$@"
fi

echo "verl-rhyme: linters"
ruff check .
ruff format --check .
mypy
shellcheck -x recipes/*.sh requirements/*.sh tests/*.sh .ci/run
# Two at a time; what shares a process, a cluster, an engine or a run stays together.
together=(python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder)
if [ "$*" = fast ]; then
  echo "verl-rhyme: unit tests, contract with verl and vLLM"
  exec "${together[@]}" -m "not slow" tests/contract tests/unit
fi
echo "verl-rhyme: unit tests, contract with verl and vLLM, the real engine, a real training"
"${together[@]}" tests/contract tests/unit
if [ "$RHYME_EXTRA" = gpu ]; then
  echo "verl-rhyme: tests/e2e left out: its engines run on a CPU, which vLLM's CUDA build cannot; without RHYME_EXTRA=gpu they run"
  exit
fi
# Training runs come first, 6 GB each, which mostly wait for processes to start; then what takes long of the rest. Runs
# of several engines have the machine's memory for themselves.
"${together[@]}" -m "not alone" tests/e2e/test_two_nodes.py tests/e2e
exec python -m pytest -m alone tests/e2e
