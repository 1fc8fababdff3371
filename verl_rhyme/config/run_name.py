"""What a run is called: its preset, and what of our tree differs from it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from verl_rhyme.config import PIPELINES, STOCK, RhymeConfig, config_tree, presets

#: Sections that change which samples an update trains, or where they are made.
_SCHEDULE = ("max_staleness", "scheduling", "streaming", "placement")
#: Sections that change no sample's distribution and may be switched from one start to the next.
_SWITCHES = ("drafting", "sampling", "lengths")
#: Options that say how long to wait.
_PATIENCE = ("scheduling.tool_timeout", "scheduling.lost_after")


def run_name(rhyme: RhymeConfig | None, *, switches: bool = True) -> str:
    """What a run is called in its folder's name and marker, in loggers, event log and reports.

    The preset whose schedule is the nearest, then what differs from it: ``full-k2-no_policy-no_drafting``. Where
    files lie and how long to wait are no part of it.

    Args:
        rhyme: ``None`` for stock verl.
        switches: Tell also what changes no sample's distribution and may be switched from one start to the next.
    """
    if rhyme is None:
        return STOCK
    has = dict(_leaves(rhyme.to_dict()))
    near = PIPELINES if rhyme.pipeline else ("histospec",)
    usual = {name: dict(_leaves(_preset(name).to_dict())) for name in near}
    preset = min(usual, key=lambda name: len(_differing(has, usual[name], _SCHEDULE)))
    sections = _SCHEDULE + (_SWITCHES if switches else ())
    return "-".join([preset, *(_told(*each) for each in _differing(has, usual[preset], sections).items())])


def _preset(name: str) -> RhymeConfig:
    rhyme = config_tree.parse(presets.tree(name))
    assert rhyme is not None, "no preset turns rhyme off"
    return rhyme


def _leaves(tree: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{where}{name}.")
        else:
            yield f"{where}{name}", value


def _differing(has: Mapping[str, Any], usual: Mapping[str, Any], sections: tuple[str, ...]) -> dict[str, Any]:
    """Options of some sections that are not as usual, in the order of the tree; ``None`` for one that is missing."""
    return {
        path: has.get(path)
        for path in dict.fromkeys((*has, *usual))  # options of a policy are in one of them only
        if path.split(".")[0] in sections and path not in _PATIENCE and has.get(path) != usual.get(path)
    }


def _told(path: str, value: Any) -> str:
    *sections, name = path.split(".")
    name = sections[-1] if name == "enable" else "k" if name == "max_staleness" else name
    if name == "k" and value is not None:
        return f"k{value}"
    if value is None or isinstance(value, bool):
        return name if value else f"no_{name}"
    text = PurePath(value).name if isinstance(value, str) else f"{name}_{value:g}"
    return re.sub(r"[^A-Za-z0-9._]+", "_", text)
