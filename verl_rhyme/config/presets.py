"""The presets, ``+rhyme=NAME``: the YAML groups of ``conf/rhyme``, each a setting of the same code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from verl_rhyme.config.checks import CONFIG_PATH

#: Folder of hydra's config groups. ``rhyme/parts`` has what presets share.
GROUPS = Path(__file__).parents[1] / "conf"

#: Name of a run without rhyme, and of the preset for it.
STOCK = "off"

#: Value of ``rollout.logprobs_mode`` that only rhyme's sampler knows (:mod:`verl_rhyme.engine.drawer`).
POLICY_LOGPROBS = "policy_logprobs"

MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
DRAFTING_MANAGER = "verl_rhyme.agent_loop.agent_loop.RhymeAgentLoopManager"
PIPELINE_MANAGER = "verl_rhyme.agent_loop.agent_loop.SessionAgentLoopManager"


def leaves(tree: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested mapping by path."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{where}{name}.")
        else:
            yield f"{where}{name}", value


def _read(file: Path) -> tuple[str, dict[str, Any]]:
    text = file.read_text()
    settings = dict(leaves(yaml.safe_load(text) or {}))
    settings.pop("defaults", None)
    return text.splitlines()[1].removeprefix("# "), settings


#: One line about each preset, and the keys of verl's config that its own file sets.
PRESET_FILES = {file.stem: _read(file) for file in sorted(GROUPS.glob("rhyme/*.yaml"))}

#: The options of each preset that differ from their defaults.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    name: {key.removeprefix(f"{CONFIG_PATH}."): value for key, value in settings.items() if key.startswith(CONFIG_PATH)}
    for name, (_, settings) in PRESET_FILES.items()
}

#: Presets that run the pipeline.
PIPELINES = tuple(name for name, options in PRESETS.items() if "max_staleness" in options)


def tree(preset: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the options of a preset, with ``changes`` by path, as a nested mapping."""
    nested: dict[str, Any] = {}
    for path, value in {**PRESETS[preset], **(changes or {})}.items():
        *sections, option = path.split(".")
        inside = nested
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[option] = value
    return nested
