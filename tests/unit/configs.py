"""verl's config with a preset, as the tests of our checks take it."""

from __future__ import annotations

import copy
import functools
import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import OmegaConf

from verl_rhyme.checks import resolvers
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.config import CONFIG_PATH, PIPELINES, STOCK, RhymeConfig
from verl_rhyme.config.presets import GROUPS

ROOT = Path(__file__).parents[2]
_VERL = Path(str(importlib.util.find_spec("verl").origin)).parent  # type: ignore[union-attr]
_CORRECTION = OmegaConf.load(_VERL / "trainer/config/algorithm/rollout_correction.yaml")
_GROUPS = ("+rhyme=", "rhyme=", "model_engine=")


@functools.cache
def _groups(*chosen: str) -> Any:
    with mock.patch.object(OmegaConf, "resolve"):  # below, after the overrides
        return compose(chosen)


def composed(*arguments: str) -> Any:
    """As :func:`compose`, which takes a second: hydra composes each choice of groups once."""
    found = copy.deepcopy(_groups(*(argument for argument in arguments if argument.startswith(_GROUPS))))
    OmegaConf.set_struct(found, False)
    changed(found, *(argument for argument in arguments if not argument.startswith(_GROUPS)))
    OmegaConf.resolve(found)
    return found


def verl_config(preset: str, *changes: str) -> Any:
    """As much of verl's config as our checks read, with a preset; ``off`` is none. Without hydra, which takes a
    second."""
    resolvers.register()
    tree = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"name": "vllm", "calculate_log_probs": True}, "actor": {}},
            "algorithm": {"adv_estimator": "grpo", "rollout_correction": _CORRECTION},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
            "transfer_queue": {"backend": {"storage_backend": "SimpleStorage"}},
        }
    )
    if preset != STOCK:  # in the order of their defaults
        OmegaConf.update(tree, CONFIG_PATH, RhymeConfig().to_dict(), force_add=True)
        for name in dict.fromkeys(("histospec", *(["parts/pipeline"] if preset in PIPELINES else []), preset)):
            tree.merge_with(OmegaConf.load(GROUPS / "rhyme" / f"{name}.yaml"))
        del tree["defaults"]
    return changed(tree, *changes)


def changed(tree: Any, *changes: str) -> Any:
    """``tree``, in which ``key=value`` was set."""
    for key, _, value in (change.partition("=") for change in changes):
        OmegaConf.update(tree, key.lstrip("+"), OmegaConf.create(f"value: {value}").value, force_add=True)
    return tree
