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

import wrapt

logger = logging.getLogger(__name__)

#: (module, function of verl-rhyme to call without arguments after the module's import)
REGISTRATIONS: tuple[tuple[str, str], ...] = (
    ("omegaconf", "verl_rhyme.checks.resolvers:register"),
    ("verl.plugin.platform.platform_manager", "verl_rhyme.testing.cpu:register_platform"),
    ("verl.workers.engine.fsdp.transformer_impl", "verl_rhyme.testing.cpu:register_fsdp_engines"),
    ("verl.workers.engine.megatron.transformer_impl", "verl_rhyme.testing.megatron_cpu:register"),
    ("verl.checkpoint_engine.base", "verl_rhyme.weights.engine:register"),
    ("verl.workers.rollout.replica", "verl_rhyme.engine.registry:register"),
    ("verl.workers.rollout.base", "verl_rhyme.engine.registry:register_adapter"),
    ("verl.trainer.ppo.v1", "verl_rhyme.trainer.registry:register"),
)

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


def _load() -> None:
    for module, function in REGISTRATIONS:
        wrapt.register_post_import_hook(_hook(function), module)
    try:
        from verl_rhyme import patches

        patches.apply_verl()
    except Exception:
        _report("verl_rhyme.patches")


_load()
