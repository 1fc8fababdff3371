"""Checks of a user's own command before verl starts Ray: the preflight's, without imports, in seconds.

``patches/hydra_run.py`` calls :func:`check` between hydra's composition of the config and the command's own code.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_rhyme.checks import combinations, doctor, run_lock
from verl_rhyme.checks.doctor import FAIL, WARN, Check
from verl_rhyme.checks.preflight import checks, config_checks, run_folder
from verl_rhyme.checks.preflight.machine import ADDRESS, in_cluster
from verl_rhyme.config import CONFIG_PATH, ConfigError, RhymeConfig, config_tree

logger = logging.getLogger(__name__)

#: Environment variable of the run scripts and of own commands that leaves out the checks of files and sizes.
SKIP = "SKIP_PREFLIGHT"


def check(config: Any) -> None:
    """Check verl's whole config if it has a rhyme tree; without one, only settings that require rhyme are refused.

    Warnings are printed on standard error.

    Raises:
        ConfigError: The run would fail, or silently ignore settings; the message has a line for each problem.
    """
    if isinstance(config.get("rhyme"), str):
        raise ConfigError(str(combinations.group_not_found(config.rhyme)))
    rhyme = config_tree.from_verl(config)
    if rhyme is not None:
        _check_installation()
    findings = _examine(config, rhyme)
    for finding in findings:
        if finding.status == WARN:
            print(f"verl-rhyme: warning: {finding}", file=sys.stderr)
    failed = [str(finding) for finding in findings if finding.status == FAIL]
    if failed:
        raise ConfigError("\n".join(failed))


def _examine(config: Any, rhyme: RhymeConfig | None) -> Sequence[Check]:
    whole = all(section in config for section in ("actor_rollout_ref", "data", "trainer", "algorithm", "reward"))
    if rhyme is None or not whole or os.environ.get(SKIP) == "1":
        return [*config_checks.rhyme(config, None), *config_checks.agent_loops(config, rhyme)]
    address = OmegaConf.select(config, ADDRESS)
    resolved = OmegaConf.create(OmegaConf.to_container(config))  # type: ignore[arg-type]
    try:
        OmegaConf.resolve(resolved)
        found = checks.examine(resolved, elsewhere=in_cluster(address), imports=False).checks
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return [*found, *config_checks.agent_loops(config, rhyme)]


def _check_installation() -> None:
    for package, version in doctor.SUPPORTED.items():
        if not doctor.supported(package):
            found = doctor.installed_version(package) or "none"
            raise ConfigError(
                f"{package} {found} is installed, but verl-rhyme supports {package} {version}: "
                f"pip install '{package}=={version}', or set {CONFIG_PATH}.enable=false"
            )
    if "verl_rhyme.plugin" not in sys.modules:
        raise ConfigError("verl does not load verl-rhyme: unset VERL_USE_EXTERNAL_PLUGINS or add verl_rhyme to it")
    from verl_rhyme import patches, plugin

    if failures := [*plugin.FAILURES, *map(str, patches.refused())]:
        listed = "\n  ".join(failures)
        raise ConfigError(f"verl-rhyme cannot patch verl or vLLM (run `verl-rhyme doctor`):\n  {listed}")


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


def how_to_resume(config: Any) -> str | None:
    """Return what an interrupted run needs to go on, in one line; ``None`` without a rhyme tree or its folder."""
    try:
        if config_tree.from_verl(config) is None:
            return None
        folder = run_folder.folder(config)
    except (OmegaConfBaseException, ValueError):
        return None
    step = run_folder.latest_step(folder)
    if step is None:
        return f"interrupted before the first checkpoint in {folder}: the same command starts again"
    return f"interrupted; the same command resumes after step {step} of {folder}"
