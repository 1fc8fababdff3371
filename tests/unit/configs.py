"""verl's config with a preset, as the tests of our checks take it."""

from __future__ import annotations

import copy
import functools
from typing import Any
from unittest import mock

from omegaconf import OmegaConf

from verl_rhyme.checks.preflight.compose import compose

_GROUPS = ("+rhyme=", "rhyme=", "model_engine=")


@functools.cache
def _groups(*chosen: str) -> Any:
    with mock.patch.object(OmegaConf, "resolve"):  # below, after the overrides
        return compose(chosen)


def composed(*arguments: str) -> Any:
    """As :func:`compose`, which takes a second: hydra composes each choice of groups once."""
    found = copy.deepcopy(_groups(*(argument for argument in arguments if argument.startswith(_GROUPS))))
    OmegaConf.set_struct(found, False)
    for key, _, value in (each.partition("=") for each in arguments if not each.startswith(_GROUPS)):
        OmegaConf.update(found, key.lstrip("+"), OmegaConf.create(f"value: {value}").value, force_add=True)
    OmegaConf.resolve(found)
    return found
