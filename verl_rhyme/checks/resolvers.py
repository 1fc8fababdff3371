"""Registers ``${rhyme.NAME:...}`` for YAML; the first one that is resolved imports the config."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

#: Functions of :mod:`verl_rhyme.checks.interpolations`.
NAMES = ("if_separate", "preset", "quotient", "rollout_is")


def register() -> None:
    """Let YAML of this process interpolate ``${rhyme.NAME:...}``."""
    for name in NAMES:
        OmegaConf.register_new_resolver(f"rhyme.{name}", _resolver(name), replace=True)


def _resolver(name: str) -> Callable[..., Any]:
    def resolve(*arguments: Any, _root_: Any) -> Any:
        module = importlib.import_module("verl_rhyme.checks.interpolations")
        return getattr(module, name)(*arguments, root=_root_)

    return resolve
