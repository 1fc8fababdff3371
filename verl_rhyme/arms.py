"""What a run is called: after what is on in it."""

from __future__ import annotations

from typing import Any

from verl_rhyme.config import SORTING_CHOICES, STOCK_ARM, RhymeConfig

#: Systems by ``sorting.mode``, beside ``sorted``, and what of each goes without saying.
_SYSTEMS = {None: "histospec", "histopipe": "histopipe", "stream": "stream"}
_SWITCHES = {"keep_running": False, "streamed": False}
_USUAL: dict[str, dict[str, Any]] = {
    "histospec": {},
    "sorted": {"load": "group", "harvest": "shortest", "start_order": "load", **_SWITCHES},
    "histopipe": {"start_order": "longest", "policy": "histopipe", **_SWITCHES},
    "stream": {"harvest": "loaded", "start_order": "longest", "policy": "makespan", **_SWITCHES, "streamed": True},
    "full": {
        **{"load": "group", "harvest": "shortest", "start_order": "longest", "policy": "makespan"},
        **{"keep_running": True, "streamed": True},
    },
}


def arm_name(rhyme: RhymeConfig | None, *, switches: bool = True) -> str:
    """What a run is called in its folder's name and marker, in loggers, event log and reports, from what is on in it.

    Args:
        rhyme: ``None`` for stock verl.
        switches: Tell also what changes no sample's distribution and may be switched from one start to the next.
    """
    if rhyme is None:
        return STOCK_ARM
    sorting, streamed = rhyme.sorting, rhyme.streaming.enable
    system = "full" if sorting.mode == "partial" and streamed else _SYSTEMS.get(sorting.mode, "sorted")
    parts = [system]
    if system == "sorted":
        parts.append(str(sorting.mode))
    if system == "stream":
        stale = sorting.max_staleness
        parts.append(("sync", "async")[stale] if stale < 2 else f"async{stale}")
    if system == "full" and sorting.max_staleness > 1:
        parts.append(str(sorting.max_staleness))
    has = {name: getattr(sorting, name) or usual for name, usual in _USUAL[system].items() if name in SORTING_CHOICES}
    has |= {"policy": rhyme.placement.policy or "unplaced", "keep_running": sorting.keep_running, "streamed": streamed}
    told = {"keep_running": ("cut", "keep_running"), "streamed": ("whole", "streamed")}
    for name, usual in _USUAL[system].items():
        if has[name] != usual:
            parts.append(told[name][has[name]] if name in told else has[name])
    if switches and rhyme.coupled:
        parts.append("coupled")
    if switches and not rhyme.drafting.enable:
        parts.append("undrafted")
    return "-".join(parts)
