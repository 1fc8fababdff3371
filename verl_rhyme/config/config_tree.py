"""Reads the typed configuration, once, from ``actor_rollout_ref.rollout.custom.rhyme``.

A key that no dataclass of :mod:`verl_rhyme.config` has is an error that names the nearest one, also when it was
appended with ``+``.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from verl_rhyme.config import CONFIG_PATH, ConfigError, RhymeConfig, coerce


def _sections() -> dict[str, set[str]]:
    """What is a mapping in the tree, and the keys of each."""
    kinds = {name: kind for name, kind in typing.get_type_hints(RhymeConfig).items() if dataclasses.is_dataclass(kind)}
    return {name: {option.name for option in dataclasses.fields(kind)} for name, kind in kinds.items()}


_SECTIONS = _sections()
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
    config = _build(RhymeConfig, tree, "")
    return config if config.enable else None


def from_verl(config: Any) -> RhymeConfig | None:
    """Read verl's whole config (a ``DictConfig``); see :func:`parse`.

    Raises:
        ConfigError: What :func:`parse` refuses, or an option of ours stands where nothing reads it (:func:`misplaced`).
    """
    from omegaconf import OmegaConf

    tree = OmegaConf.select(config, CONFIG_PATH)
    found = parse(None if tree is None else OmegaConf.to_container(tree, resolve=True))  # type: ignore[arg-type]
    for error in misplaced(config, sections=found is not None):
        raise ConfigError(error)
    return found


def misplaced(config: Any, sections: bool = True) -> Iterator[str]:
    """Options of ours that stand where nothing reads them: for each an error that says what to write.

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


def _misplaced(node: Mapping[Any, Any], path: tuple[str, ...], sections: bool) -> Iterator[str]:
    near = set(path) <= set(_PARENTS)  # elsewhere it is ours only by all that is in it
    for key, value in node.items():
        here = (*path, str(key))
        if here == (*_PARENTS, "rhyme"):
            continue
        if key == "rhyme" and (near or _has_only(value, _OPTIONS)):
            yield _belongs(here, _first(value), _first(value) or ("enable",))
        elif near and sections and key == "max_staleness":
            yield _belongs(here, (), (key,))
        elif near and sections and _has_only(value, _SECTIONS.get(key, set())):
            yield _belongs(here, _first(value), (key, *_first(value)))
        elif isinstance(value, Mapping):
            yield from _misplaced(value, here, sections)


def _belongs(here: tuple[str, ...], below: tuple[str, ...], option: tuple[str, ...]) -> str:
    wrong, name = ".".join((*here, *below)), ".".join(option)
    return f"{wrong} is read by nobody: did you mean {CONFIG_PATH}.{name}?"


def _has_only(node: Any, known: set[str]) -> bool:
    return isinstance(node, Mapping) and bool(node) and set(node) <= known


def _leaves(node: Any) -> Iterator[tuple[str, ...]]:
    """The paths to all values below a node; one that is empty for a plain value, or an empty mapping."""
    if not isinstance(node, Mapping) or not node:
        yield ()
        return
    for key, value in node.items():
        yield from ((str(key), *inside) for inside in _leaves(value))


def _first(node: Any) -> tuple[str, ...]:
    return next(_leaves(node))


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
