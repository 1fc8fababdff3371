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

#: Options of earlier versions, sections that ended as a whole, and what to write instead.
GONE: Mapping[str, str] = {
    "poll_interval": "drop it; the replay buffer looks every 0.25 s",
    "history.timeout": "drop it; the history writer has 300 s for each piece of an update",
    "history.keep": "drop it; other nodes keep copies of the histories that their replicas need",
    "drafting.sampler_memory": "drop it; drafting.logits_memory bounds what drafts take",
    **{
        f"drafting.{name}": "drop it; drafting.policy=paper is as it is published"
        for name in ("options", "reward_weight", "match", "window")
    },
    "sampling.verify": "drop it; our sampler verifies",
    "sorting": "set max_staleness; `verl-rhyme options` lists all that there is",
    "sorting.mode": "set max_staleness: 0 for on_policy; 1 or more for partial, histopipe and stream, whose other "
    "rules +rhyme=sorted, +rhyme=histopipe and +rhyme=stream set",
    "sorting.max_staleness": "set max_staleness",
    "sorting.max_versions": "set max_staleness, which is one less",
    "sorting.group_batches": "set scheduling.in_flight",
    "sorting.load": "set scheduling.refill=when_empty for group; for rolling and refill scheduling.in_flight, whose "
    "null goes by max_staleness",
    "sorting.harvest": "set scheduling.take: finished for shortest, loaded for loaded",
    "sorting.harvest_tokens": "drop it; updates train whole batches",
    "sorting.start_order": "drop it; the longest expected prompts start first",
    "sorting.probe": "drop it; no sample of a prompt waits for another",
    "sorting.draft_ahead": "drop it; max_staleness=1 trains what is generated meanwhile",
    "sorting.keep_running": "set scheduling.at_version=finish",
    "sorting.oversubscription": "drop it; engines are given twice what their slots take",
    "sorting.redraft": "drop it; a regenerated response drafts from its own text wherever drafting.enable is true",
    "sorting.stop_wait": "drop it; the pipeline has its own deadline",
    "sorting.coupled": "set sampling.coupled",
    "sorting.unit": "set scheduling.unit",
    "sorting.order": "set scheduling.order",
    "sorting.lost_after": "set scheduling.lost_after",
    "sorting.tool_timeout": "set scheduling.tool_timeout",
    "streaming.enable": "drop it; separate engines stream parts, and streaming.part=null turns that off",
    "streaming.update": "drop it; gradients of parts are added up wherever that is exact, and streaming.part=null "
    "turns parts off",
    "streaming.elastic.enable": "set streaming.elastic.min_replicas, whose null is off",
    "streaming.elastic.least": "set streaming.elastic.min_replicas",
    "streaming.elastic.most": "set streaming.elastic.max_replicas",
    "streaming.elastic.start": "drop it; as many replicas begin as may generate",
    "streaming.elastic.window": "drop it; the rule goes by the medians of four steps",
    "weights.link_patience": "drop it; a node that sends nothing is waited for 600 s",
    "lengths.ranker.enable": "set lengths.ranker.kind: boosting or model, null is off",
    "lengths.ranker.loss": "set lengths.ranker.options.loss (lengths.ranker.kind=model)",
    "lengths.ranker.rate": "set lengths.ranker.options.rate (lengths.ranker.kind=model)",
    "lengths.ranker.most": "drop it; the ranker is trained on the latest 8192 prompts",
}


#: Where the tree is easily put by mistake.
_WRONG_PLACES = ("rhyme", "custom.rhyme", "actor_rollout_ref.rhyme", "actor_rollout_ref.rollout.rhyme")


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
    for error in misplaced(config):
        raise ConfigError(error)
    return found


def ended(option: str) -> str | None:
    """What to write instead of an option of an earlier version (its path in the tree); ``None`` for any other."""
    parts = option.split(".")
    wholes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((GONE[whole] for whole in wholes if whole in GONE), None)


def misplaced(config: Any) -> Iterator[str]:
    """Trees of ours that stand where nothing reads them: for each an error that says what to write.

    Args:
        config: verl's whole config (a ``DictConfig``).
    """
    from omegaconf import OmegaConf

    for place in _WRONG_PLACES:
        found = OmegaConf.select(config, place)
        if found is not None and not isinstance(found, str):  # a text is a group that was not found: combinations.py
            yield f"{place} is read by nobody: did you mean {CONFIG_PATH}?"


def _leaves(node: Any) -> Iterator[tuple[str, ...]]:
    """The paths to all values below a node; one that is empty for a plain value, or an empty mapping."""
    if not isinstance(node, Mapping) or not node:
        yield ()
        return
    for key, value in node.items():
        yield from ((str(key), *inside) for inside in _leaves(value))


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
            for old in (".".join((path, *inside)) for inside in _leaves(value)):
                if remedy := ended(old):
                    raise ConfigError(f"{CONFIG_PATH}.{old} has ended: {remedy}")
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
