# shellcheck shell=bash
# Checks of the variables of every run script. An error is one line and status 2. NAME is the script's name, ROOT the
# checkout's folder. Python checks the hydra options (verl-rhyme preflight, verl-rhyme claim).

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

number() { # number VARIABLE MINIMUM [MEANING OF THE MINIMUM]
  [[ ! "${!1}" =~ ^-[0-9]+$ ]] || refuse "$1=${!1} is below $2${3:+, $3}"
  [[ "${!1}" =~ ^[0-9]{1,9}$ ]] || refuse "$1=${!1} is not a whole number"
  [ "$((10#${!1}))" -ge "$2" ] || refuse "$1=${!1} is below $2${3:+, $3}"
}

plain_path() { # plain_path VARIABLE [MEANING]: hydra's grammar needs quotes around any other character
  local LC_ALL=C plain='A-Za-z0-9 _./+@%:$*?|-' other # in C a letter is one of A to Z
  other=${!1//[$plain]/}
  [ -z "$other" ] || refuse "${2:-$1}=${!1} contains $other, which hydra cannot read in a path; use only" \
    "letters a-z and A-Z, digits, spaces and . _ - + @ %"
}

hold_lock() { # hold_lock CHECKPOINTS: keep the lock of `verl-rhyme claim` to the end of the run, which inherits it
  [ -e "$1/run.lock" ] || return 0 # trainer.default_local_dir is overridden: the training process locks it
  local status=0
  exec 9<> "$1/run.lock"
  flock -n -E 3 9 || status=$? # any other: no locks there, as claim has reported
  [ "$status" != 3 ] || refuse "$1 is in use by another start; set another RUN_DIR"
  export VERL_RHYME_RUN_LOCK=9
}

check_preset() { # check RHYME, STALENESS and MODE; set PRESET_ARGS, their hydra overrides
  local presets
  RHYME=${RHYME:-histospec}
  presets=$(cd "$ROOT/verl_rhyme/conf/rhyme" && echo *.yaml)
  # shellcheck disable=SC2086  # one word per preset
  one_of RHYME ${presets//.yaml/}
  MODE=${MODE:-$([ "$RHYME" = stream ] && echo separate_async || echo sync)}
  # shellcheck disable=SC2034  # read by the scripts
  PRESET_ARGS=("rhyme=$RHYME" "trainer.v1.trainer_mode=$MODE")
  [ -n "${STALENESS:-}" ] || return 0
  [[ ! "$RHYME" =~ ^(off|histospec)$ ]] || refuse "STALENESS=$STALENESS needs the pipeline, which RHYME=$RHYME" \
    "does not run; drop STALENESS, or set RHYME=full"
  number STALENESS 0 "which is on-policy"
  PRESET_ARGS+=("actor_rollout_ref.rollout.custom.rhyme.max_staleness=$((10#$STALENESS))")
}
