"""Check a command that uses rhyme, and lock its folder, between hydra's composition and the command's own code."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from verl_rhyme.patches.core import Patch, around


def _check_first(
    original: Any, *, hydra: Any, config_name: str | None, task_function: Any, overrides: list[str], **mode: Any
) -> Any:
    from verl_rhyme.config import ConfigError, config_tree

    folders: set[Path] = set()  # of the jobs of a multirun

    @functools.wraps(task_function)
    def checked(config: Any) -> Any:
        if not config_tree.is_used(config):
            return task_function(config)
        from verl_rhyme.checks import startup

        try:
            startup.begin(config, task_function, folders)
        except ConfigError as error:  # hydra prints other exceptions with a traceback
            raise SystemExit("\n".join(f"verl-rhyme: {line}" for line in str(error).splitlines())) from None
        try:
            return task_function(config)
        except KeyboardInterrupt:
            if line := startup.how_to_resume(config):
                print(f"verl-rhyme: {line}", file=sys.stderr)
                _hide_traceback()
            raise

    for owner, name in ((hydra, "compose_config"), (hydra.config_loader, "load_sweep_config")):
        setattr(owner, name, _composed(getattr(owner, name), config_name or "", overrides))
    return original(hydra=hydra, config_name=config_name, task_function=checked, overrides=overrides, **mode)


def _hide_traceback() -> None:
    """Let an interrupt end this process without a traceback, but still by its signal: after a mere exit status, 130, a
    shell continues with the next command of a loop or script.
    """
    hook = sys.excepthook

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            hook(kind, error, trace)

    sys.excepthook = shown


def _composed(original: Any, config_name: str, overrides: list[str]) -> Any:
    """Return hydra's function of composition with errors in one line that name the nearest key."""
    from hydra.errors import HydraException

    from verl_rhyme.config import config_tree

    @functools.wraps(original)
    def compose(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except HydraException as error:
            if not any("rhyme" in each or config_tree.is_near_rhyme(each.partition("=")[0]) for each in overrides):
                raise
            from verl_rhyme.checks.preflight.compose import message

            raise SystemExit(f"verl-rhyme: {message(error, config_name, overrides)}") from None

    return compose


PATCH = Patch(
    name="hydra_run",
    target="hydra._internal.utils:_run_app",
    why="a misspelt option, a missing file or another release of verl appears only after minutes, inside a Ray worker; "
    "neither verl nor hydra calls a plugin between reading the configuration and starting Ray that could refuse it",
    requires="hydra-core>=1.3,<1.4",
    source_sha256="f82b87f3946fed4de306dc8e37824f80574766413cdee0c58b6a92f967f0ffdd",
    replace=around(_check_first),
)
