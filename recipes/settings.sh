# shellcheck shell=bash
# What every run script asks of its variables. Each refusal is one line and status 2. NAME is the script's, ROOT the
# checkout's folder. Whatever is hydra's, Python looks at (verl-rhyme preflight, verl-rhyme claim).

refuse() {
  echo "$NAME: $*" >&2
  exit 2
}

one_of() { # one_of VARIABLE VALUE...
  local variable=$1 value
  shift
  for value in "$@"; do
    [ "${!variable}" != "$value" ] || return 0
  done
  refuse "$variable=${!variable} is unknown; use one of $*"
}

number() { # number VARIABLE LEAST [WHAT THE LEAST IS]
  [[ ! "${!1}" =~ ^-[0-9]+$ ]] || refuse "$1=${!1} is below $2${3:+, $3}"
  [[ "${!1}" =~ ^[0-9]{1,9}$ ]] || refuse "$1=${!1} is no whole number"
  [ "$((10#${!1}))" -ge "$2" ] || refuse "$1=${!1} is below $2${3:+, $3}"
}

plain_path() { # plain_path VARIABLE [WHAT IT IS]: hydra's grammar takes no other character without quotes
  local LC_ALL=C plain='A-Za-z0-9 _./+@%:$*?|-' other # in C a letter is one of A to Z
  other=${!1//[$plain]/}
  [ -z "$other" ] || refuse "${2:-$1}=${!1} contains $other, which hydra cannot read in a path; choose one of the" \
    "letters a-z and A-Z, digits, spaces and . _ - + @ %"
}

check_preset() { # RHYME, STALENESS, MODE; hydra's overrides for them: PRESET_ARGS
  local gone presets
  for gone in SORTED_MODE SORTED_COUPLED STREAM_MODE; do
    [ -z "${!gone:-}" ] || refuse "$gone is gone: set STALENESS, the most policy versions between a response's tokens" \
      "and the update that trains them (0: on-policy)"
  done
  RHYME=${RHYME:-histospec}
  presets=$(cd "$ROOT/verl_rhyme/conf/rhyme" && echo *.yaml)
  # shellcheck disable=SC2086  # one word a preset
  one_of RHYME ${presets//.yaml/}
  MODE=${MODE:-$([ "$RHYME" = stream ] && echo separate_async || echo sync)}
  # shellcheck disable=SC2034  # the scripts read it
  PRESET_ARGS=("rhyme=$RHYME" "trainer.v1.trainer_mode=$MODE")
  [ -n "${STALENESS:-}" ] || return 0
  [[ ! "$RHYME" =~ ^(off|histospec)$ ]] || refuse "STALENESS=$STALENESS bounds the pipeline, which RHYME=$RHYME has not;" \
    "drop it, or set RHYME=full"
  number STALENESS 0 "which is on-policy"
  PRESET_ARGS+=("actor_rollout_ref.rollout.custom.rhyme.max_staleness=$((10#$STALENESS))")
}
