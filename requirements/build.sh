#!/usr/bin/env bash
# Builds packages of the training engines that have no wheel for this torch and CUDA, and installs them into .venv-gpu.
# NAME.lock has the versions and hashes.
#   bash requirements/build.sh                      both packages
#   bash requirements/build.sh transformer-engine   for Megatron
#   bash requirements/build.sh flash-attn           for FSDP
#   --unless-tried                                  skip packages that failed here before (for bootstrap.sh)
#   CUDA_ARCHS="90"   compute capabilities (default: those of this machine's GPUs, or 80 and 90 without a GPU)
#   MAX_JOBS          parallel compilers (default: one per core with 8 GiB of memory each)
# nvcc and CUDA's headers come from .venv-gpu. The machine needs a C++ compiler and Python's headers. Built files stay
# in .venv-gpu/build, so that a second start resumes. A package counts as built only if it can be imported.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$root/.venv-gpu" python="$root/.venv-gpu/bin/python"

report() { echo "verl-rhyme: $*"; }
refuse() {
  report "$*" >&2
  echo "  For alternatives see recipes/README.md, Start." >&2
  exit 1
}

packages=() unless_tried=0
for name in "$@"; do
  case "$name" in
    --unless-tried) unless_tried=1 ;;
    transformer-engine | flash-attn) packages+=("$name") ;;
    *) refuse "cannot build '$name'; name transformer-engine or flash-attn, or no package for both" ;;
  esac
done
[ ${#packages[@]} -gt 0 ] || packages=(transformer-engine flash-attn)
[ -e "$venv/.verl-rhyme" ] || refuse "no finished .venv-gpu; first: RHYME_EXTRA=gpu RHYME_BUILD=0 source requirements/bootstrap.sh"

wanted() { { cat "$root/requirements/$1.lock"; grep -A 1 '^torch==' "$root/requirements/gpu.lock"; } | sha256sum | cut -c1-16; }
built() { [ "$(cat "$venv/.$1" 2>/dev/null)" = "$(wanted "$1")" ]; }
failed() { [ "$(cat "$venv/.$1.failed" 2>/dev/null)" = "$(wanted "$1")" ]; }

missing=()
for name in "${packages[@]}"; do
  if built "$name"; then continue; fi
  if [ $unless_tried = 1 ] && failed "$name"; then
    report "$name could not be built here before; to try again: bash requirements/build.sh $name" >&2
    continue
  fi
  missing+=("$name")
done
[ ${#missing[@]} -gt 0 ] || exit 0

# pip handles an interrupt; bash would treat it as a failed build and start the next one.
trap 'trap - INT; kill -INT $$' INT
exec 9>"$venv/.build.lock" # one build at a time
flock -n 9 || { report "another process is building; waiting for it"; flock 9; }

# ---- environment of the compilers ----

site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cuda="$site/nvidia/cu13"
[ -x "$cuda/bin/nvcc" ] || refuse "no nvcc in .venv-gpu ($cuda/bin)"
c++ --version >/dev/null 2>&1 || refuse "no C++ compiler; on Debian and Ubuntu: apt-get install g++"
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -f "$headers/Python.h" ] || refuse "no $headers/Python.h; on Debian and Ubuntu: apt-get install python3-dev"

capabilities() { # one per line, such as 90
  if [ -n "${CUDA_ARCHS:-}" ]; then
    tr ' ;,' '\n' <<<"$CUDA_ARCHS"
  elif nvidia-smi -L >/dev/null 2>&1; then
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader | tr -d '. '
  else
    printf '80\n90\n'
  fi
}
joined() { sort -un | paste -sd ';'; }
jobs() {
  local cores memory
  cores=$(nproc) memory=$(awk '/MemAvailable/ {print int($2 / 8388608)}' /proc/meminfo)
  echo $((memory < 1 ? 1 : memory < cores ? memory : cores))
}
# the linker needs libNAME.so, the packages have libNAME.so.13
mkdir -p "$venv/build/lib"
for library in "$cuda"/lib/*.so.* "$site"/nvidia/{cudnn,nccl}/lib/*.so.*; do
  stem=${library##*/}
  ln -sf "$library" "$venv/build/lib/${stem%%.so.*}.so"
done
export CUDA_HOME=$cuda CUDACXX=$cuda/bin/nvcc PATH="$cuda/bin:$venv/bin:$PATH" VIRTUAL_ENV=$venv
export CPLUS_INCLUDE_PATH=$cuda/include:$cuda/include/cccl:$site/nvidia/cudnn/include:$site/nvidia/nccl/include
export LIBRARY_PATH=$venv/build/lib MAX_JOBS=${MAX_JOBS:-$(jobs)} NVCC_THREADS=1
# nvcc 13.2 works with the headers of torch's CUDA 13.0; the flag disables the version check in CUDA's C++ headers
export NVCC_APPEND_FLAGS="-DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK ${NVCC_APPEND_FLAGS:-}"
# Transformer Engine
export NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE
# the sources are in our checkout: Transformer Engine would put our commit into its version, and then fail to import
export NVTE_NO_LOCAL_VERSION=1 GIT_CEILING_DIRECTORIES=$venv/build
NVTE_CUDA_ARCHS=$(capabilities | joined)
# flash-attn: one build covers all of 8.x, 10.x and 12.x; build it, because its prebuilt wheels have no hash in our lock
export FLASH_ATTENTION_FORCE_BUILD=TRUE
FLASH_ATTN_CUDA_ARCHS=$(capabilities | sed 's/^8.$/80/; s/^10.$/100/; s/^12.$/120/' | joined)
export NVTE_CUDA_ARCHS FLASH_ATTN_CUDA_ARCHS

# ---- one package ----

declare -A source=([transformer-engine]=transformer-engine-torch [flash-attn]=flash-attn)
declare -A module=([transformer-engine]=transformer_engine.pytorch [flash-attn]=flash_attn)
declare -A duration=([transformer-engine]="7.5 minutes on two cores for one architecture" [flash-attn]="minutes on many cores, hours on few")

build() { # build NAME: download its sources, compile its wheels, check all hashes; an existing wheel is reused
  local folder lock="$root/requirements/$1.lock" from=${source[$1]} uv
  folder="$venv/build/$1-$(wanted "$1")"
  uv=$(command -v uv)
  mkdir -p "$folder"
  awk -v name="$from==" 'index($0, name) == 1 {found = 1} found {print; if (!/\\$/) exit}' "$lock" > "$folder/source.lock"
  if [ ! -e "$folder/wheel/done" ]; then
    if [ ! -e "$folder/unpacked" ]; then
      rm -rf "$folder/source" && mkdir "$folder/source"
      "$python" -m pip download -q --disable-pip-version-check --no-deps --no-build-isolation --no-binary :all: \
        --require-hashes -r "$folder/source.lock" -d "$folder"
      tar -xzf "$folder"/*.tar.gz -C "$folder/source" --strip-components 1
      touch "$folder/unpacked"
    fi
    rm -rf "$folder/wheel"
    "$python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation "$folder/source" -w "$folder/wheel"
    touch "$folder/wheel/done"
    rm -rf "$folder/source" "$folder/unpacked" "$folder"/*.tar.gz
  fi
  grep -vxFf "$folder/source.lock" "$lock" > "$folder/wheels.lock" || true
  if [ -s "$folder/wheels.lock" ]; then
    "$uv" pip install -q --python "$venv" --no-deps --require-hashes --reinstall -r "$folder/wheels.lock"
  fi
  "$uv" pip install -q --python "$venv" --no-deps --reinstall "$folder"/wheel/*.whl
  (cd / && "$python" -c "import torch, ${module[$1]}") # a package that builds may still fail to import
  wanted "$1" > "$venv/.$1"
  rm -f "$venv/.$1.failed"
}

status=0
for name in "${missing[@]}"; do
  if built "$name"; then continue; fi # built by the process we waited for
  log="$venv/build/$name.log"
  report "building $name for $(capabilities | joined) with $MAX_JOBS compilers (${duration[$name]}; RHYME_BUILD=0 skips it)."
  report "log: $log"
  set +e # a condition would disable it inside the subshell
  (set -e; build "$name") >"$log" 2>&1 </dev/null
  set -e
  if built "$name"; then
    report "$name is built"
  else
    wanted "$name" > "$venv/.$name.failed"
    tail -n 5 "$log" >&2
    report "$name could not be built, see $log; or use verl's image: recipes/README.md, Start" >&2
    status=1
  fi
done
exit $status
