# shellcheck shell=bash
# RHYME=sorted for every run script: checks SORTED_MODE, SORTED_COUPLED and MODE, and leaves hydra's overrides in SORTED_ARGS.

resolve_sorted() { # resolve_sorted NAME
  local rhyme=actor_rollout_ref.rollout.custom.rhyme coupled
  case "${SORTED_MODE:=on_policy}" in
    on_policy | partial) ;;
    *) echo "$1: SORTED_MODE=$SORTED_MODE is unknown; use on_policy or partial" >&2 && return 2 ;;
  esac
  case "${SORTED_COUPLED:=0}" in
    0) coupled=false ;;
    1) coupled=true ;;
    *) echo "$1: SORTED_COUPLED=$SORTED_COUPLED is unknown; use 0 or 1" >&2 && return 2 ;;
  esac
  if [ "${MODE:-sync}" != sync ]; then
    echo "$1: MODE=$MODE and RHYME=sorted exclude each other: sorted is a trainer mode of its own" >&2
    return 2
  fi
  # shellcheck disable=SC2034  # read by whoever sources this
  SORTED_ARGS=("+rhyme=sorted" "$rhyme.sorting.mode=$SORTED_MODE" "$rhyme.sampling.coupled=$coupled")
}
