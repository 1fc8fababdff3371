# shellcheck shell=bash
# What every run script asks of its variables. Each refusal is one line and status 2; NAME is the script's.

refuse() {
  echo "$NAME: $*" >&2
  exit 2
}

listed() { # listed VALUE... : a, b or c
  local last=${*: -1} text=$1 value
  for value in "${@:2:$#-2}"; do text+=", $value"; done
  echo "$text or $last"
}

one_of() { # one_of VARIABLE VALUE...
  local variable=$1 value
  shift
  for value in "$@"; do
    [ "${!variable}" != "$value" ] || return 0
  done
  refuse "$variable=${!variable} is unknown; use $(listed "$@")"
}

number() { # number VARIABLE LEAST [WHAT THE LEAST IS]
  [[ "${!1}" =~ ^[0-9]{1,9}$ ]] || refuse "$1=${!1} is no whole number"
  [ "$((10#${!1}))" -ge "$2" ] || refuse "$1=${!1} is below $2${3:+, $3}"
}

check_names() { # of variables; an earlier one would go unseen
  [ -z "${MODEL_PATH:-}" ] || refuse "MODEL_PATH is now called MODEL: set MODEL=$MODEL_PATH"
}

plain_path() { # plain_path VARIABLE [WHAT IT IS]: hydra's grammar takes no other character without quotes
  local LC_ALL=C plain='A-Za-z0-9 _./+@%:$*?|-' other # in C a letter is one of A to Z
  other=${!1//[$plain]/}
  [ -z "$other" ] || refuse "${2:-$1}=${!1} contains $other, which hydra cannot read in a path; choose one of the" \
    "letters a-z and A-Z, digits, spaces and . _ - + @ %"
}

pipelined() { # RHYME has the sorted pipeline's trainer
  [[ "$RHYME" =~ ^(sorted|histopipe|stream|full)$ ]]
}

default_mode() { # verl's trainer mode, where none is chosen
  case "$RHYME" in
    stream | full) echo separate_async ;;
    *) echo sync ;;
  esac
}

check_rhyme() { # RHYME, MODE, of sorted SORTED_MODE and SORTED_COUPLED, of stream STREAM_MODE; hydra's overrides: RHYME_ARGS
  local system modes systems=() allowed=any
  while read -r system modes _; do
    systems+=("$system")
    [ "$system" != "$RHYME" ] || allowed=$modes
  done < <(_systems)
  one_of RHYME "${systems[@]}"
  [ "$allowed" = any ] || [[ ",$allowed," == *",${MODE:-${allowed%%,*}},"* ]] ||
    refuse "MODE=$MODE and RHYME=$RHYME exclude each other; with $RHYME use MODE=${allowed//,/ or }"
  if [ "$RHYME" != sorted ]; then
    local hint="is of RHYME=sorted; with RHYME=$RHYME drop it"
    [ "$RHYME" != histopipe ] || hint+=" (MODE says how stale a token may get: at most 1 in separate_async, 0 in the others)"
    [ "$RHYME" != stream ] || hint+=" (STREAM_MODE says how stale a token may get: 0 in sync, at most 1 in async)"
    [ -z "${SORTED_MODE:-}" ] || refuse "SORTED_MODE=$SORTED_MODE $hint"
    [ "${SORTED_COUPLED:-0}" = 0 ] || refuse "SORTED_COUPLED=$SORTED_COUPLED ${hint% (*}"
  fi
  [ "$RHYME" = stream ] || [ -z "${STREAM_MODE:-}" ] ||
    refuse "STREAM_MODE=$STREAM_MODE is of RHYME=stream; with RHYME=$RHYME drop it"
  RHYME_ARGS=("+rhyme=$RHYME")
  case "$RHYME" in
    stream)
      STREAM_MODE=${STREAM_MODE:-async}
      one_of STREAM_MODE sync async
      [ "$STREAM_MODE" = async ] ||
        RHYME_ARGS+=(actor_rollout_ref.rollout.custom.rhyme.sorting.max_staleness=0)
      ;;
    sorted)
      local tree=actor_rollout_ref.rollout.custom.rhyme coupled=(false true)
      SORTED_MODE=${SORTED_MODE:-on_policy}
      one_of SORTED_MODE on_policy partial
      RHYME_ARGS+=("$tree.sorting.mode=$SORTED_MODE")
      if [ -n "${SORTED_COUPLED:-}" ]; then
        one_of SORTED_COUPLED 0 1
        RHYME_ARGS+=("$tree.sampling.coupled=${coupled[SORTED_COUPLED]}")
      fi
      ;;
  esac
}

tell_systems() { # what RHYME is, and what the others would be
  local system modes what
  while read -r system modes what; do
    [ "$system" != "$RHYME" ] || echo "$NAME: RHYME=$system: $what"
  done < <(_systems)
  while read -r system modes what; do
    [ "$system" = "$RHYME" ] || printf '  or RHYME=%-10s %s\n' "$system" "$what"
  done < <(_systems)
}

_systems() {
  grep '^[a-z]' "${BASH_SOURCE[0]%/*}/../verl_rhyme/conf/systems.txt"
}

# after check_rhyme, hydra's: the folder is called after RHYME, SORTED_MODE, SORTED_COUPLED, STREAM_MODE. OmegaConf takes
# True for true; coupled and max_versions are earlier names (verl_rhyme/config_tree.py).
check_overrides() {
  local override key value tree=actor_rollout_ref.rollout.custom.rhyme mode=$RHYME # of histopipe and stream, the rules' name
  case "$RHYME" in
    sorted) mode=$SORTED_MODE ;;
    full) mode=partial ;;
    off | histospec) mode=null ;;
  esac
  for override in "$@"; do
    [[ ! "$override" =~ ^[A-Z_]+= ]] ||
      refuse "$override is a variable, not one of hydra's overrides; set it before the command: $override bash recipes/..."
    key=${override%%=*} value=${override#*=} value=${value,,}
    while [[ "$key" == [+~]* ]]; do key=${key:1}; done
    case "$RHYME-$key" in
      *-rhyme | *-rhyme@*)
        refuse "$override chooses a system behind the back of RHYME=$RHYME, which names the run's folder; drop it, and set" \
          "RHYME=NAME before the command"
        ;;
      *-"$tree".enable)
        [[ "$RHYME-$value" =~ ^(off-false|[^o].*-true)$ ]] ||
          refuse "$override contradicts RHYME=$RHYME, which names the run's folder; use RHYME=off for stock verl"
        ;;
      *-"$tree".sorting.mode)
        [ "$value" = "$mode" ] ||
          refuse "$override contradicts RHYME=$RHYME${SORTED_MODE:+ SORTED_MODE=$SORTED_MODE}, which names the rules and the" \
            "run's folder; use RHYME=sorted with SORTED_MODE=on_policy or partial, or RHYME=histopipe"
        ;;
      sorted-"$tree".sampling.coupled | sorted-"$tree".sorting.coupled)
        [[ "$value-$(_coupled)" =~ ^(true-1|false-0)$ ]] ||
          refuse "$override contradicts SORTED_COUPLED=$(_coupled), which names the run's folder; use SORTED_COUPLED=0 or 1"
        ;;
      stream-"$tree".sorting.max_versions)
        refuse "$override is an earlier name of $tree.sorting.max_staleness, which is one less; use STREAM_MODE=sync or async"
        ;;
      stream-"$tree".sorting.max_staleness)
        [[ "$value-$STREAM_MODE" =~ ^(0-sync|[1-9][0-9]*-async)$ ]] ||
          refuse "$override contradicts STREAM_MODE=$STREAM_MODE, which names the run's folder; use STREAM_MODE=sync or async"
        ;;
    esac
  done
}

observable() { # observable RUN_DIR: OBSERVE, and hydra's overrides OBSERVE_ARGS: verl names its servers, and vLLM counts
  OBSERVE=${OBSERVE:-1} OBSERVE_ARGS=()
  one_of OBSERVE 0 1
  local tree=actor_rollout_ref.rollout
  # shellcheck disable=SC2034  # the scripts read it
  [ "$OBSERVE" = 0 ] || OBSERVE_ARGS=(
    "$tree.disable_log_stats=false" "$tree.prometheus.enable=true" "$tree.prometheus.file=$1/servers.yml"
  )
}

observed() { # observed RUN_DIR COMMAND...: the command's status; meanwhile its bubble ratio goes to sampled.jsonl
  local folder=$1 observer='' status=0 me=$BASHPID # a run that ends at once may be gone before the observer looks
  shift
  if [ "$OBSERVE" = 1 ]; then
    mkdir -p "$folder"
    python -m verl_rhyme.observability.observe "$folder" --parent "$me" &
    observer=$!
  fi
  "$@" || status=$?
  if [ -n "$observer" ]; then
    kill "$observer" 2>/dev/null || true
    wait "$observer" || true
  fi
  return "$status"
}

_coupled() { # SORTED_COUPLED, or its default: 1 on-policy
  case "$SORTED_MODE-${SORTED_COUPLED:-}" in
    *-1 | on_policy-) echo 1 ;;
    *) echo 0 ;;
  esac
}

arm_name() { # of RHYME, SORTED_MODE, SORTED_COUPLED and STREAM_MODE: as verl_rhyme.config.arm_name
  case "$RHYME-$([ "$RHYME" != sorted ] || _coupled)" in
    sorted-1) echo "sorted-$SORTED_MODE-coupled" ;;
    sorted-*) echo "sorted-$SORTED_MODE" ;;
    stream-*) echo "stream-$STREAM_MODE" ;;
    *) echo "$RHYME" ;;
  esac
}
