"""Check the rhyme configuration and lock the run folder before verl starts Ray: verl has no plugin hook there."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.core import Patch, around


def _check_rhyme_first(original: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    import ray
    from omegaconf import OmegaConf

    from verl_rhyme.config import CONFIG_PATH, ConfigError, config_tree

    ours = OmegaConf.select(config, CONFIG_PATH) is not None
    if ours or any(config_tree.find_misplaced(config)):
        from verl_rhyme.checks.startup import check, hold_folder

        try:
            check(config)
            hold_folder(config)
        except ConfigError as error:
            if ray.is_initialized():  # SystemExit would kill a worker
                raise
            raise SystemExit(f"verl-rhyme: {error}") from None  # hydra prints other exceptions with a traceback
    original(config, *args, **kwargs)


PATCH = Patch(
    name="verl_early_check",
    target="verl.utils.config:validate_config",
    why="a misspelt rhyme option or a missing component appears only after a minute, inside a Ray worker; "
    "verl calls no plugin between reading the configuration and starting Ray",
    requires="verl==0.9.1",
    source_sha256="9e2d82e4b51e7099f5c295c96ba1d117c7255965a1ed14e8bc25f289f56f2028",
    replace=around(_check_rhyme_first),
)
