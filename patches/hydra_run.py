"""Check a command that uses rhyme, and lock its folder, between hydra's composition and the command's own code."""

from __future__ import annotations

import functools
import sys
from typing import Any

from verl_rhyme.patches.core import Patch, around


def _check_first(
    original: Any,
    hydra: Any,
    config_name: str | None,
    task_function: Any,
    overrides: list[str],
    *args: Any,
    **kwargs: Any,
) -> Any:
    from hydra.errors import HydraException
    from omegaconf import OmegaConf

    from verl_rhyme.config import CONFIG_PATH, ConfigError, config_tree

    def ours(config: Any) -> bool:
        return OmegaConf.select(config, CONFIG_PATH) is not None or any(config_tree.find_misplaced(config))

    @functools.wraps(task_function)
    def checked(config: Any) -> Any:
        from verl_rhyme.checks import startup

        if not (isinstance(config.get("rhyme"), str) or ours(config)):
            return task_function(config)
        try:
            startup.check(config)
            startup.hold_folder(config)
        except ConfigError as error:  # hydra prints other exceptions with a traceback
            raise SystemExit("\n".join(f"verl-rhyme: {line}" for line in str(error).splitlines())) from None
        try:
            return task_function(config)
        except KeyboardInterrupt:
            if line := startup.how_to_resume(config):
                print(f"verl-rhyme: {line}", file=sys.stderr)
            raise

    try:
        return original(hydra, config_name, checked, overrides, *args, **kwargs)
    except HydraException as error:
        from verl_rhyme.checks.preflight import compose

        if not any("rhyme" in override for override in overrides):
            raise
        raise SystemExit(f"verl-rhyme: {compose.message(error, hydra, config_name or '', overrides)}") from None


PATCH = Patch(
    name="hydra_run",
    target="hydra._internal.hydra:Hydra.run",
    why="a misspelt option, a missing file or another release of verl appears only after minutes, inside a Ray worker; "
    "neither verl nor hydra calls a plugin between reading the configuration and starting Ray that could refuse it",
    requires="hydra-core>=1.3,<1.4",
    source_sha256="09220438e4595de63d593260c1d34e56be9f2862a92531b56841a571ead03ac4",
    replace=around(_check_first),
)
