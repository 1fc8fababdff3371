"""Checks of versions, config, files and shared memory before Ray starts, for runs with a rhyme tree."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from packaging.version import Version

from verl_rhyme.checks import combinations, loss, run_lock
from verl_rhyme.checks.combinations import Refusal
from verl_rhyme.checks.preflight.plan import data_files
from verl_rhyme.config import CONFIG_PATH, ConfigError, RhymeConfig, config_tree
from verl_rhyme.config.presets import DRAFTING_MANAGER, MANAGER, PIPELINE_MANAGER
from verl_rhyme.history import history_folder
from verl_rhyme.history.environment import HistoryError
from verl_rhyme.patches.core import installed_version
from verl_rhyme.router import router_file
from verl_rhyme.scheduling.rules import of_config

logger = logging.getLogger(__name__)

#: Supported releases of verl and vLLM; the doctor checks the same ones.
SUPPORTED = {"verl": "0.9.1", "vllm": "0.24.0"}

#: Minimum of /dev/shm for a weight sync, in bytes.
SHM_BYTES = 256 << 20


def check(config: Any) -> None:
    """Refuse settings of verl's whole config that would fail later or be silently ignored.

    Without a rhyme tree, or with ``enable=false``, only settings that require rhyme are refused.

    Raises:
        ConfigError: The run would fail; the message has the reason and the remedy.
    """
    if isinstance(config.get("rhyme"), str):
        raise ConfigError(str(combinations.group_not_found(config.rhyme)))
    rhyme = config_tree.from_verl(config)
    if rhyme is not None:
        _check_versions()
        _check_plugin()
    for refusal in refusals(config, rhyme):
        raise ConfigError(str(refusal))
    if rhyme is None:
        return
    check_agent_loops(config, rhyme)
    _check_files(config)
    if rhyme.history.dir is not None:
        try:
            history_folder.check(rhyme.history.dir)
        except HistoryError as error:
            raise ConfigError(str(error)) from None
    _check_shared_memory()
    for problem in loss.warnings(config, of_config(config, rhyme)):
        logger.warning("%s", problem)


def hold_folder(config: Any) -> None:
    """Lock the checkpoint folder of a run with a rhyme tree until this process ends.

    Raises:
        ConfigError: Another run uses the folder.
    """
    folder = str(config.trainer.default_local_dir)
    if config_tree.from_verl(config) is None or "://" in folder:
        return
    try:
        run_lock.hold(Path(folder).absolute())
    except run_lock.FolderInUse as error:
        raise ConfigError(str(error)) from None
    except OSError as error:  # the trainer may run on another machine, which has the disk
        logger.warning("%s cannot be locked on this machine: %s", folder, error)


def refusals(config: Any, rhyme: RhymeConfig | None) -> list[Refusal]:
    """Return all refusals of a config that do not depend on the machine."""
    found = list(combinations.refusals(config, rhyme))
    if rhyme is None:
        return found
    try:
        router_file.check(rhyme.placement)
        router_file.check_own(config)
    except ConfigError as error:
        found.append(Refusal(str(error)))
    return found


def _check_versions() -> None:
    for package, supported in SUPPORTED.items():
        found = installed_version(package)
        if found is None or Version(found).base_version != supported:
            raise ConfigError(
                f"{package} {found or 'none'} is installed, but verl-rhyme supports {package} {supported}: "
                f"pip install '{package}=={supported}', or set {CONFIG_PATH}.enable=false"
            )


def _check_plugin() -> None:
    from verl_rhyme import patches, plugin

    failures = [*plugin.FAILURES, *map(str, patches.refused())]
    if failures:
        listed = "\n  ".join(failures)
        raise ConfigError(f"verl-rhyme cannot patch verl or vLLM (run `verl-rhyme doctor`):\n  {listed}")


def check_agent_loops(config: Any, rhyme: RhymeConfig) -> None:
    """Check that a user's own agent loop manager derives from rhyme's; imports its class.

    Raises:
        ConfigError: The class does not derive from rhyme's manager, or cannot be imported.
    """
    name = OmegaConf.select(config, MANAGER)
    if name in (DRAFTING_MANAGER, PIPELINE_MANAGER, None):  # TABLE refuses the first with the pipeline
        return
    from verl.utils.import_utils import load_class_from_fqn

    needed = PIPELINE_MANAGER if rhyme.pipeline else DRAFTING_MANAGER
    try:
        known = issubclass(load_class_from_fqn(name), load_class_from_fqn(needed))
    except Exception as error:
        raise ConfigError(f"{MANAGER}={name} cannot be imported: {error}") from error
    if not known:
        raise ConfigError(
            f"{MANAGER}={name} does not derive from {needed}, which rhyme requires: replace verl's manager among its "
            "bases with that class, or drop the override"
        )


def _check_files(config: Any) -> None:
    for option in ("train_files", "val_files"):
        for file in data_files(config, option):
            if "://" not in file and not os.path.exists(os.path.expanduser(file)):
                raise ConfigError(f"data.{option}: no file {file}; create or download the dataset, or correct the path")


def _check_shared_memory() -> None:
    """Check the room in /dev/shm, through which verl sends weights where devices have no IPC."""
    from verl.plugin.platform import get_platform

    if get_platform().is_ipc_supported():
        return
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        raise ConfigError(f"no shared memory ({error}): mount a tmpfs on /dev/shm for the weight sync") from None
    if free < SHM_BYTES:
        raise ConfigError(
            f"/dev/shm has {free >> 20} MiB free, the weight sync needs at least {SHM_BYTES >> 20} MiB: free shared "
            "memory, or start the container with a larger --shm-size"
        )
