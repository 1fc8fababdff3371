"""The config that ``python -m verl.trainer.main_ppo ARGS`` would run with, without running it.

Hydra's own argument parser, search path and composer do the work, as behind verl's ``@hydra.main``. Its compose API
takes no ``--config-dir`` and reads a relative ``--config-path`` from the caller's file, hence its ``_internal`` here;
``tests/contract/test_preflight.py`` holds the result equal to what verl's command prints.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.hydra import Hydra
from hydra._internal.utils import compute_search_path_dir, create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_rhyme.config import ConfigError

#: The file of verl's ``@hydra.main``, and what that names.
_MAIN, _CONFIG_PATH, _CONFIG_NAME = "trainer/main_ppo.py", "config", "ppo_trainer"


def compose(arguments: Sequence[str]) -> DictConfig:
    """Compose and resolve.

    Args:
        arguments: What stands after ``python -m verl.trainer.main_ppo``: ``--config-path``, ``--config-name``,
            ``--config-dir`` and overrides, all optional. A relative ``--config-path`` counts from verl's
            ``main_ppo.py``, as with verl.

    Returns:
        The whole tree without hydra's own node; no interpolation is left in it.

    Raises:
        ConfigError: It does not compose or not resolve; the message is hydra's.
    """
    parser = get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]  # argparse would end the process
    args = parser.parse_intermixed_args(list(arguments))
    if args.multirun:
        raise ConfigError("--multirun is many configs: give the overrides of one")
    main = _verl() / _MAIN
    state = GlobalHydra.instance(), HydraConfig.instance().cfg
    previous = state[0].hydra
    try:
        search = create_config_search_path(compute_search_path_dir(str(main), None, args.config_path or _CONFIG_PATH))
        if args.config_dir is not None:
            folder = os.path.abspath(args.config_dir)
            if not os.path.isdir(folder):
                raise ConfigError(f"--config-dir {args.config_dir}: no such folder")
            search.prepend("command-line", f"file://{folder}", SearchPathQuery(provider="schema"))
        state[0].clear()
        hydra = Hydra.create_main_hydra2(main.stem, search)
        config = hydra.compose_config(
            config_name=args.config_name or _CONFIG_NAME,
            overrides=args.overrides,
            run_mode=RunMode.RUN,
            with_log_configuration=False,
        )
        HydraConfig.instance().set_config(config)  # ${hydra:...} reads it
        config = hydra.get_sanitized_cfg(config, "job")
        OmegaConf.resolve(config)
        return config
    except (HydraException, OmegaConfBaseException) as error:
        cause = f"\n{error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
        raise ConfigError(f"{error}{cause}") from error
    finally:
        state[0].hydra = previous
        HydraConfig.instance().cfg = state[1]


def _verl() -> Path:
    found = importlib.util.find_spec("verl")  # imports nothing
    if found is None or not found.submodule_search_locations:
        raise ConfigError("verl is not installed here, and the config is its own: install verl==0.9.1")
    return Path(found.submodule_search_locations[0])


def _refuse(message: str) -> None:
    raise ConfigError(f"arguments after --: {message}; give them as for `python -m verl.trainer.main_ppo`")
