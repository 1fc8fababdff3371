"""The ``verl.plugins`` entry point: verl imports this module in every one of its processes.

:data:`REGISTRATIONS` and ``patches/`` list everything that verl-rhyme registers or patches in verl. Each entry waits
for the import of its module, so this module costs verl almost nothing. verl logs plugin errors at DEBUG level only.
This module prints them and keeps them in :data:`FAILURES`; a run that uses rhyme does not start with failures.
"""

import importlib
import logging
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

logger = logging.getLogger(__name__)

#: (module, function of verl-rhyme to call without arguments after the module's import)
REGISTRATIONS: tuple[tuple[str, str], ...] = (
    ("omegaconf", "verl_rhyme.plugin:register_interpolations"),
    ("verl.plugin.platform.platform_manager", "verl_rhyme.platforms.cpu:register_platform"),
    ("verl.workers.engine.fsdp.transformer_impl", "verl_rhyme.platforms.cpu:register_fsdp_engines"),
    ("verl.workers.engine.megatron.transformer_impl", "verl_rhyme.platforms.megatron_cpu:register"),
    ("verl.checkpoint_engine.base", "verl_rhyme.weights.engine:register"),
    ("verl.workers.rollout.replica", "verl_rhyme.engine.registry:register"),
    ("verl.workers.rollout.base", "verl_rhyme.engine.registry:register_adapter"),
    ("verl.trainer.ppo.v1", "verl_rhyme.trainer.registry:register"),
)

#: Functions of :mod:`.checks.interpolations`, written ``${rhyme.NAME:...}`` in YAML.
INTERPOLATIONS = ("if_separate", "preset", "quotient", "rollout_is")
#: Registrations and patches that failed in this process, one line each.
FAILURES: list[str] = []


def _report(what: str) -> None:
    """Report on standard error and in :data:`FAILURES` that ``what`` failed with the current exception."""
    line = f"{what}: {sys.exc_info()[1]!r}"
    FAILURES.append(line)
    print(f"verl-rhyme: FAILED {line}\n{traceback.format_exc()}", file=sys.stderr, flush=True)


def _hook(function: str) -> Callable[[ModuleType], None]:
    def call(_module: ModuleType) -> None:
        try:
            module, name = function.split(":")
            getattr(importlib.import_module(module), name)()
        except Exception:
            _report(function)

    return call


def register_interpolations() -> None:
    """Register ``${rhyme.NAME:...}`` for the YAML of this process; the first use imports the config."""
    from omegaconf import OmegaConf

    def resolver(name: str) -> Callable[..., Any]:
        def resolve(*arguments: Any, _root_: Any) -> Any:
            module = importlib.import_module("verl_rhyme.checks.interpolations")
            return getattr(module, name)(*arguments, root=_root_)

        return resolve

    for name in INTERPOLATIONS:
        OmegaConf.register_new_resolver(f"rhyme.{name}", resolver(name), replace=True)


def _load() -> None:
    for module, function in REGISTRATIONS:
        wrapt.register_post_import_hook(_hook(function), module)
    try:
        from verl_rhyme import patches

        patches.apply_verl()
    except Exception:
        _report("verl_rhyme.patches")


_load()
