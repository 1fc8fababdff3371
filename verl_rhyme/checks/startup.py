"""Checks of every run, once, and the lock of its folder: the preflight's checks without imports, in seconds.

``patches/hydra_run.py`` calls :func:`begin` between hydra's composition of the config and the command's own code,
before Ray starts; for the jobs of ``--multirun`` as well. ``trainer/registry.py`` calls it where verl makes the
trainer: there it checks the runs of mains without hydra, after the start of Ray.
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

from verl_rhyme.checks import doctor, run_lock
from verl_rhyme.checks.doctor import FAIL, WARN, Check
from verl_rhyme.checks.preflight import checks, config_checks, run_folder, unknown_keys, user_code
from verl_rhyme.checks.preflight.machine import ADDRESS, in_cluster
from verl_rhyme.config import CONFIG_PATH, V1_ONLY, ConfigError, RhymeConfig, config_tree

logger = logging.getLogger(__name__)

#: Key of verl's config with the process that checked the run and holds its folder; copies of the config keep it.
STARTED_BY = f"{CONFIG_PATH}_started_by"

#: Environment variable of the run scripts and of own commands that leaves out the checks of files and sizes.
SKIP = "SKIP_PREFLIGHT"


def begin(config: Any, main: Any = None, others: set[Path] | None = None) -> None:
    """Check a run and lock its folder until this process ends, unless :data:`STARTED_BY` in the config says it is done.

    ``main`` is the command's function before Ray starts, ``None`` in the trainer's process; ``others`` are the folders
    of earlier jobs of this command, to which this one is added. Raises ConfigError if :func:`check` refuses the run, or
    another run or job has its folder.
    """
    folder = Path(str(OmegaConf.select(config, "trainer.default_local_dir"))).absolute()
    mark = OmegaConf.select(config, STARTED_BY)
    user = run_lock.user(folder)
    if user and mark is not None and str(mark) in user:
        return
    uses = config_tree.from_verl(config) is not None
    if uses and main is not None and (trainer := user_code.old_trainer(main)) is not None:
        raise ConfigError(f"this command trains with {trainer}, {V1_ONLY}")
    if uses and others is not None and folder in others:
        raise ConfigError(
            f"trainer.default_local_dir={folder} is the folder of an earlier job of this command, and this job would "
            "resume from its checkpoints: name what varies in it, for example "
            "'trainer.default_local_dir=checkpoints/lr-${actor_rollout_ref.actor.optim.lr}'"
        )
    if uses and user and not run_lock.is_held(folder):
        raise ConfigError(user)
    user_code.own_main = main is None or not user_code.is_verls(main)
    check(config, in_task=main is None)
    if not uses:
        return
    if others is not None:
        others.add(folder)
    try:
        run_lock.hold(folder)
    except OSError as error:  # the trainer may run on another machine, which has the disk
        logger.warning("%s cannot be locked on this machine: %s", folder, error)
        return
    OmegaConf.update(config, STARTED_BY, run_lock.owner(folder), force_add=True)


def check(config: Any, in_task: bool = False) -> None:
    """Check verl's whole config if it has a rhyme tree; without one, only settings that require rhyme are refused.

    Warnings go to standard error. ``in_task``: Ray hides GPUs from this task, and holds memory already, so that checks
    of this machine warn. The engines take the length of drafts that is set in ``config``. Raises ConfigError, with a
    line for each problem, if the run would fail or silently ignore settings.
    """
    rhyme = config_tree.from_verl(config)
    if rhyme is not None:
        _check_installation()
    findings, tokens = _examine(config, rhyme, in_task)
    if failed := [str(finding) for finding in findings if finding.status == FAIL]:
        raise ConfigError("\n".join(failed))
    for finding in findings:
        if finding.status == WARN:
            print(f"verl-rhyme: warning: {finding}", file=sys.stderr)
    if tokens:
        OmegaConf.update(config, config_tree.CHOSEN, tokens, force_add=True)


def _examine(config: Any, rhyme: RhymeConfig | None, in_task: bool) -> tuple[Sequence[Check], int]:
    """Return the findings, and the most draft tokens of a request in a step; 0 if that is the engines' choice."""
    whole = all(section in config for section in ("actor_rollout_ref", "data", "trainer", "algorithm", "reward"))
    if rhyme is None or not whole or os.environ.get(SKIP) == "1":
        keys = unknown_keys.check(config, rhyme)
        return [*config_checks.rhyme(config, None), *keys, *config_checks.agent_loops(config, rhyme)], 0
    address = OmegaConf.select(config, ADDRESS)
    resolved = OmegaConf.create(OmegaConf.to_container(config))  # type: ignore[arg-type]
    try:
        OmegaConf.resolve(resolved)
        found = checks.examine(resolved, elsewhere=in_task or in_cluster(address), imports=False)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    return [*found.checks, *config_checks.agent_loops(config, rhyme)], found.draft_tokens


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
