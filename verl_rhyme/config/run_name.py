"""Name a run after its preset and the options that differ from the preset."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from verl_rhyme.config import PIPELINES, PRESETS, STOCK, RhymeConfig
from verl_rhyme.config.presets import leaves

#: Sections that change which samples a training step trains, or which replica generates them.
_SCHEDULE = ("max_staleness", "scheduling", "streaming", "placement")
#: Sections that do not change the distribution of samples; a resumed run may change them.
_SWITCHES = ("drafting", "sampling", "lengths")
#: Options that set a waiting time.
_WAITING = ("scheduling.tool_timeout", "scheduling.lost_after", "scheduling.outage_timeout")


def run_name(rhyme: RhymeConfig | None, *, switches: bool = True) -> str:
    """Return the name of a run for its folder, loggers, event log and reports.

    The name is the preset with the nearest schedule, then the options that differ: ``full-k2-no_policy-no_drafting``.
    Options of folders and of waiting times are left out; without ``switches`` also the sections that a resumed run may
    change.
    """
    if rhyme is None:
        return STOCK
    options = dict(leaves(rhyme.to_dict()))
    candidates = [name for name in PRESETS if name != STOCK and (name in PIPELINES) == rhyme.pipeline]
    stock = dict(leaves(RhymeConfig().to_dict()))
    defaults = {name: {**stock, **PRESETS[name]} for name in candidates}
    preset = min(defaults, key=lambda name: len(_differing(options, defaults[name], _SCHEDULE)))
    sections = _SCHEDULE + (_SWITCHES if switches else ())
    return "-".join([preset, *(_label(*each) for each in _differing(options, defaults[preset], sections).items())])


def _differing(options: Mapping[str, Any], defaults: Mapping[str, Any], sections: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of some sections that differ from the defaults; ``None`` for a missing option."""
    return {
        path: options.get(path)
        for path in dict.fromkeys((*options, *defaults))  # placement.options exist on one side only
        if path.split(".")[0] in sections and path not in _WAITING and options.get(path) != defaults.get(path)
    }


def _label(path: str, value: Any) -> str:
    *sections, name = path.split(".")
    name = sections[-1] if name == "enable" else "k" if name == "max_staleness" else name
    if name == "k" and value is not None:
        return f"k{value}"
    if value is None or isinstance(value, bool):
        return name if value else f"no_{name}"
    text = PurePath(value).name if isinstance(value, str) else f"{name}_{value:g}"
    return re.sub(r"[^A-Za-z0-9._]+", "_", text)
