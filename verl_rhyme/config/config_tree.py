"""Read the typed configuration from ``actor_rollout_ref.rollout.custom.rhyme``.

An unknown key is an error that names the nearest known key, even if the command adds the key with ``+``.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from verl_rhyme.config import CONFIG_PATH, ConfigError, RhymeConfig
from verl_rhyme.config.checks import coerce

#: Key of verl's config with the most draft tokens of a request in a step, as start-up chose them for the memory.
CHOSEN = f"{CONFIG_PATH}_draft_tokens"
#: Sections of verl's config in which users look for :data:`CONFIG_PATH`.
_PLACES = ("", "custom", "actor_rollout_ref", "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.custom")


def parse(tree: Mapping[str, Any] | None) -> RhymeConfig | None:
    """Return the configuration of the options at :data:`CONFIG_PATH`; ``None`` without options or ``enable``.

    Raises ConfigError if a key is unknown, a value has the wrong type or range, or options contradict each other.
    """
    if tree is None:
        return None
    config = _build(RhymeConfig, tree, "")
    return config if config.enable else None


def from_verl(config: Any) -> RhymeConfig | None:
    """Return the configuration in verl's full config (a ``DictConfig``); raises ConfigError as :func:`parse`, and for
    options at a path that is not read.
    """
    from omegaconf import OmegaConf

    tree = OmegaConf.select(config, CONFIG_PATH)
    rhyme = parse(None if tree is None else OmegaConf.to_container(tree, resolve=True))  # type: ignore[arg-type]
    for error in find_misplaced(config):
        raise ConfigError(error)
    return rhyme


def is_used(config: Any) -> bool:
    """Whether verl's full config has options of rhyme, at the right path or at a wrong one."""
    from omegaconf import OmegaConf

    given = isinstance(config.get("rhyme"), str) or OmegaConf.select(config, CONFIG_PATH) is not None
    return given or any(find_misplaced(config))


def find_misplaced(config: Any) -> Iterator[str]:
    """Yield an error for each section that is called rhyme, or nearly so, in verl's full config outside
    :data:`CONFIG_PATH`: nothing reads it.
    """
    from omegaconf import OmegaConf

    for place in _PLACES:
        section = OmegaConf.select(config, place) if place else config
        for name in map(str, section) if OmegaConf.is_dict(section) else ():
            path = f"{place}.{name}".lstrip(".")
            if path == CONFIG_PATH or not is_near_rhyme(name) or (value := section[name]) is None:
                continue
            group = not place and isinstance(value, str)
            if group and name == "rhyme":  # checks/combinations.py reports an unknown group
                continue
            option = next((f".{key}" for key in value), "") if OmegaConf.is_dict(value) else ""
            given, meant = (f"={value}", f"+rhyme={value}") if group else (option, f"{CONFIG_PATH}{option}")
            yield f"{path}{given} is not read: did you mean {meant}?"


def is_near_rhyme(name: str) -> bool:
    return bool(difflib.get_close_matches(name.lower(), ("rhyme", "verl_rhyme"), cutoff=0.8))


def from_rollout(rollout_config: Any) -> RhymeConfig | None:
    """Return the configuration in verl's rollout config (``DictConfig`` or ``RolloutConfig``); see :func:`parse`."""
    from omegaconf import OmegaConf

    tree = (rollout_config.get("custom", None) or {}).get("rhyme", None)
    if OmegaConf.is_config(tree):
        tree = OmegaConf.to_container(tree, resolve=True)
    return parse(tree)


def chosen_tokens(rollout_config: Any) -> int | None:
    """Return the draft tokens that start-up chose (:data:`CHOSEN`) in verl's rollout config; ``None`` without one."""
    return (rollout_config.get("custom", None) or {}).get(CHOSEN.rpartition(".")[2])


def _build(cls: type[Any], tree: Any, where: str) -> Any:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{CONFIG_PATH}.{where} must be a mapping, not {tree!r}")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        path = f"{where}.{key}" if where else str(key)
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.5)
            full = f"{CONFIG_PATH}.{where}.".replace("..", ".")
            hint = f"did you mean {full}{near[0]}?" if near else f"known here: {', '.join(hints)}"
            raise ConfigError(f"unknown key {CONFIG_PATH}.{path}: {hint}")
        hint = hints[key]
        nested = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        values[key] = _build(hint, value, path) if nested else coerce(value, hint, path)
    return cls(**values)
