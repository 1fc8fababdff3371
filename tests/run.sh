#!/usr/bin/env bash
# Runs the linters and the tests; creates .venv-cpu if it is missing.
#   bash tests/run.sh                      everything, as in CI
#   bash tests/run.sh fast                 linters, unit and contract tests, without the slow ones
#   bash tests/run.sh tests/unit -k store  arguments for pytest, without the linters
#   RHYME_SLOW=1          also tests that take hours or fail rarely: weekly, and before a release
#   RHYME_EXTRA=cpu|gpu   environment (default: cpu on every machine, because the tests run the engine on a CPU); gpu:
#                         unit and contract tests on the CUDA build of vLLM, without a GPU
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
RHYME_EXTRA=${RHYME_EXTRA:-cpu} RHYME_BUILD=${RHYME_BUILD:-0}
# shellcheck source=requirements/bootstrap.sh
source "$ROOT/requirements/bootstrap.sh"
cd "$ROOT"

# More threads would only wait for the cores of the other processes.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} VERL_PLATFORM=${VERL_PLATFORM:-cpu} RAY_USAGE_STATS_ENABLED=0
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

if [ $# -gt 0 ] && [ "$*" != fast ]; then
  exec python -m pytest "$@"
fi

echo "verl-rhyme: linters"
# Meanwhile the drafter's kernels are compiled, which both workers would compile at the same time in a fresh checkout.
python -c "from verl_rhyme.drafting import adaptive; adaptive.warm()" &
compiling=$!
ruff check .
ruff format --check .
mypy
wait "$compiling"
shellcheck -x recipes/*.sh requirements/*.sh tests/*.sh .ci/run
# Two workers; tests that share a process, a cluster, an engine or a run stay on one worker.
together=(python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder)
if [ "$*" = fast ]; then
  echo "verl-rhyme: unit tests, contract with verl and vLLM"
  exec "${together[@]}" -m "not slow" tests/contract tests/unit
fi
echo "verl-rhyme: unit tests, contract with verl and vLLM, the real engine, real training runs"
"${together[@]}" tests/contract tests/unit
if [ "$RHYME_EXTRA" = gpu ]; then
  echo "verl-rhyme: skipping tests/e2e: its engines need vLLM's CPU build; run without RHYME_EXTRA=gpu"
  exit
fi
# Training runs start first: they take 6 GB each and mostly wait for processes. Then the other long tests
# (tests/e2e/conftest.py). Runs with several engines run alone, because they need the machine's memory.
"${together[@]}" -m "not alone" tests/e2e
mapfile -t files < <(grep -l mark.alone tests/e2e/test_*.py)
exec python -m pytest -m alone "${files[@]}"
