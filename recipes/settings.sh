# shellcheck shell=bash
# What every run script asks of its variables. Each refusal is one line and status 2; NAME is the script's.

refuse() {
  echo "$NAME: $*" >&2
  exit 2
}

one_of() { # one_of VARIABLE VALUE...
  local variable=$1 value known=$2
  shift
  for value in "$@"; do
    [ "${!variable}" != "$value" ] || return 0
  done
  for value in "${@:2:$#-2}"; do known+=", $value"; done
  refuse "$variable=${!variable} is unknown; use $known or ${*: -1}"
}

number() { # number VARIABLE LEAST [WHAT THE LEAST IS]
  [[ "${!1}" =~ ^[0-9]{1,9}$ ]] || refuse "$1=${!1} is no whole number"
  [ "$((10#${!1}))" -ge "$2" ] || refuse "$1=${!1} is below $2${3:+, $3}"
}

plain_path() { # plain_path VARIABLE [WHAT IT IS]: hydra's grammar takes no other character without quotes
  local LC_ALL=C plain='A-Za-z0-9 _./+@%:$*?|-' other # in C a letter is one of A to Z
  other=${!1//[$plain]/}
  [ -z "$other" ] || refuse "${2:-$1}=${!1} contains $other, which hydra cannot read in a path; choose one of the" \
    "letters a-z and A-Z, digits, spaces and . _ - + @ %"
}

check_rhyme() { # RHYME and, for sorted, SORTED_MODE, SORTED_COUPLED and MODE; leaves hydra's overrides in SORTED_ARGS
  case "$RHYME" in
    histopipe | stream | full) refuse "RHYME=$RHYME does not exist yet; use histospec, sorted or off" ;;
  esac
  one_of RHYME histospec sorted off
  [ "$RHYME" = sorted ] || return 0
  local tree=actor_rollout_ref.rollout.custom.rhyme coupled=(false true)
  SORTED_MODE=${SORTED_MODE:-on_policy} SORTED_COUPLED=${SORTED_COUPLED:-0}
  one_of SORTED_MODE on_policy partial
  one_of SORTED_COUPLED 0 1
  [ "${MODE:-sync}" = sync ] ||
    refuse "MODE=$MODE and RHYME=sorted exclude each other: sorted is a trainer mode of its own"
  # shellcheck disable=SC2034  # read by whoever sources this
  SORTED_ARGS=("+rhyme=sorted" "$tree.sorting.mode=$SORTED_MODE" "$tree.sampling.coupled=${coupled[SORTED_COUPLED]}")
}

sorted_name() { # of SORTED_MODE and SORTED_COUPLED, for a run's folder
  case "$SORTED_COUPLED" in
    1) echo "$SORTED_MODE-coupled" ;;
    *) echo "$SORTED_MODE" ;;
  esac
}
