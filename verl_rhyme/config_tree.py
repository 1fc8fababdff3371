"""Reads the typed configuration, once, from ``actor_rollout_ref.rollout.custom.rhyme``.

A key that no dataclass of :mod:`verl_rhyme.config` has is an error that names the nearest one, also when it was
appended with ``+``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verl_rhyme.config import CONFIG_PATH, ConfigError, RhymeConfig, coerce

logger = logging.getLogger(__name__)


def _one_less(value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value - 1 if number else value  # else refused under the new name


#: Keys of earlier versions: what they are called now, and the value there of a value of theirs. At ``null`` they are
#: not set; so they stand in a group's file where an override without ``+`` is to find them.
RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "sorting.coupled": ("sampling.coupled", lambda value: value),
    "sorting.max_versions": ("sorting.max_staleness", _one_less),
}

#: Keys that are gone, and what to do.
_GONE = {
    "drafting.sampler_memory": f"drop it; what drafts may take is now {CONFIG_PATH}.drafting.logits_memory, and its "
    "default is enough for all that pay",
    "history.keep": "drop it; the trainer's node keeps all prompts, and another one copies of those that its replicas "
    "answer",
}


#: What is a mapping in the tree, and the keys of each.
_SECTIONS: dict[str, set[str]] = {
    name: {option.name for option in dataclasses.fields(kind)}
    for name, kind in typing.get_type_hints(RhymeConfig).items()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}
#: What the tree's root may have.
_OPTIONS = {option.name for option in dataclasses.fields(RhymeConfig)}


def parse(tree: Mapping[str, Any] | None) -> RhymeConfig | None:
    """Read the tree at :data:`CONFIG_PATH`.

    Args:
        tree: Plain nested mapping, or ``None`` when the command has no ``+rhyme=...``.

    Returns:
        The configuration, or ``None`` when there is none or ``enable`` is false.

    Raises:
        ConfigError: Unknown key, wrong type, value out of range, or a contradiction.
    """
    if tree is None:
        return None
    config = _build(RhymeConfig, _renamed(tree), "")
    return config if config.enable else None


def _renamed(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tree with keys of earlier versions under their new names.

    A new key at its default, where a group's file has it, gives way to the old one.
    """
    for old, (new, convert) in RENAMED.items():
        (group, key), (new_group, new_key) = old.split("."), new.split(".")
        inside = tree.get(group)
        if not isinstance(inside, Mapping) or key not in inside:
            continue
        value = inside[key]
        tree = {**tree, group: {name: kept for name, kept in inside.items() if name != key}}
        beside = tree.get(new_group) or {}
        if value is None or not isinstance(beside, Mapping):
            continue
        tree = {**tree, new_group: {**beside, new_key: convert(value)}}
        if (ours := beside.get(new_key)) not in (None, _default(new), convert(value)):
            raise ConfigError(
                f"{CONFIG_PATH}.{old}={value} contradicts {CONFIG_PATH}.{new}={ours}, whose earlier name it is: drop it"
            )
        other = f": write {convert(value)} for {value}" if convert(value) != value else ""
        logger.warning("%s.%s is now called %s.%s%s", CONFIG_PATH, old, CONFIG_PATH, new, other)
    return tree


def _default(path: str) -> Any:
    return functools.reduce(getattr, path.split("."), RhymeConfig())


def from_verl(config: Any) -> RhymeConfig | None:
    """Read verl's whole config (a ``DictConfig``); see :func:`parse`.

    Raises:
        ConfigError: What :func:`parse` refuses, or an option of ours stands where nothing reads it (:func:`misplaced`).
    """
    from omegaconf import OmegaConf

    tree = OmegaConf.select(config, CONFIG_PATH)
    found = parse(None if tree is None else OmegaConf.to_container(tree, resolve=True))  # type: ignore[arg-type]
    for wrong, right in misplaced(config, sections=found is not None):
        raise ConfigError(f"{wrong} is read by nobody: did you mean {right}?")
    return found


def misplaced(config: Any, sections: bool = True) -> Iterator[tuple[str, str]]:
    """Options of ours that stand where nothing reads them, and where they belong.

    Args:
        config: verl's whole config (a ``DictConfig``).
        sections: Look for sections of the tree (``drafting.floor``) that lack ``rhyme``, too. Without rhyme they may be
            somebody else's.
    """
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(config, resolve=False)
    if not isinstance(plain.get("rhyme"), str):  # else a group that was not found: combinations.py
        yield from _misplaced(plain, (), sections)


#: Of the path to the tree, what stands before ``rhyme``.
_PARENTS = tuple(CONFIG_PATH.split(".")[:-1])


def _misplaced(node: Mapping[Any, Any], path: tuple[str, ...], sections: bool) -> Iterator[tuple[str, str]]:
    near = set(path) <= set(_PARENTS)  # elsewhere it is ours only by all that is in it
    for key, value in node.items():
        here = (*path, str(key))
        if here == (*_PARENTS, "rhyme"):
            continue
        if key == "rhyme" and (near or _has_only(value, _OPTIONS)):
            option = _first(value)
            yield ".".join((*here, *option)), ".".join((CONFIG_PATH, *(option or ("enable",))))
        elif near and sections and _has_only(value, _SECTIONS.get(key, set())):
            option = _first(value)
            yield ".".join((*here, *option)), ".".join((CONFIG_PATH, key, *option))
        elif isinstance(value, Mapping):
            yield from _misplaced(value, here, sections)


def _has_only(node: Any, known: set[str]) -> bool:
    return isinstance(node, Mapping) and bool(node) and set(node) <= known


def _first(node: Any) -> tuple[str, ...]:
    """The path to the first value below a node; empty for a plain value."""
    if not isinstance(node, Mapping) or not node:
        return ()
    key, value = next(iter(node.items()))
    return (str(key), *_first(value))


def from_rollout(rollout_config: Any) -> RhymeConfig | None:
    """Read verl's rollout config (``DictConfig`` or the ``RolloutConfig`` dataclass); see :func:`parse`."""
    from omegaconf import OmegaConf

    tree = (rollout_config.get("custom", None) or {}).get("rhyme", None)
    if OmegaConf.is_config(tree):
        tree = OmegaConf.to_container(tree, resolve=True)
    return parse(tree)


def _build(cls: type[Any], tree: Any, where: str) -> Any:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{CONFIG_PATH}.{where} must be a mapping, not {tree!r}")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        path = f"{where}.{key}" if where else str(key)
        if path in _GONE:
            raise ConfigError(f"{CONFIG_PATH}.{path} is gone: {_GONE[path]}")
        if key not in hints:
            raise ConfigError(_unknown_key(str(key), path, list(hints)))
        hint = hints[key]
        nested = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        values[key] = _build(hint, value, path) if nested else coerce(value, hint, path)
    return cls(**values)


def _unknown_key(key: str, path: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    parent = path[: -len(key)]
    hint = f"did you mean {CONFIG_PATH}.{parent}{near[0]}?" if near else f"known here: {', '.join(known)}"
    return f"unknown key {CONFIG_PATH}.{path}: {hint}"
