"""What would stop a run, found before anything heavy starts. Each finding says how to mend it.

:mod:`.config_checks` look at the config alone, :mod:`.machine_checks` compare it with what is here. A dry run may
happen on another machine than the run, so there the latter warn where they would fail; so do versions. Another run's
checkpoints in this run's folder are no lack of this machine, and fail there, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl_rhyme.checks import doctor
from verl_rhyme.checks.doctor import FAIL, OK, WARN, Check
from verl_rhyme.checks.preflight import config_checks, history_room, machine_checks, run_folder
from verl_rhyme.checks.preflight.estimate import Estimate, estimate
from verl_rhyme.checks.preflight.machine import Machine, look
from verl_rhyme.checks.preflight.plan import ENGINES, Plan, check_numbers, read


@dataclass(frozen=True)
class Preflight:
    """All that was found.

    Attributes:
        checks: What fails, then what warns, then what is fine; each in the order of what would stop a run first.
        plan: What verl will do with the config.
        estimate: ``None`` where the model or the strategy is not known; a check says why.
        machine: What is here.
    """

    checks: list[Check]
    plan: Plan
    estimate: Estimate | None
    machine: Machine

    @property
    def failed(self) -> int:
        """Findings that would stop the run."""
        return sum(check.status == FAIL for check in self.checks)


def examine(
    config: Any, dry_run: bool = False, with_doctor: bool = True, notes: Mapping[str, str] | None = None
) -> Preflight:
    """All checks of a resolved config on this machine.

    Args:
        config: From :func:`verl_rhyme.checks.preflight.compose.compose`.
        dry_run: What only this machine lacks warns instead of failing, and the doctor looks at versions only.
        with_doctor: Look at Python, packages, plugin and patches at all; 20 to 45 s unless ``dry_run``.
        notes: Of :func:`verl_rhyme.checks.preflight.run_folder.describe`.

    Raises:
        ConfigError: A size is no number.
        ValueError: ``GPU_MEMORY_GB`` is no number.
    """
    check_numbers(config)
    machine = look()
    model_check, fields, model = machine_checks.model(config)
    positions = fields.get("max_position_embeddings")
    plan = read(config, positions)
    memory = machine.host_bytes if plan.device == "cpu" else machine.gpu_bytes
    found = estimate(model, plan, memory) if model else None
    there: list[Check] = [
        *machine_checks.datasets(config),
        *model_check,
        *machine_checks.reward_function(config, load=with_doctor and not dry_run),
        *machine_checks.engine(config, plan, load=with_doctor and not dry_run),
        *machine_checks.gpus(plan, machine),
    ]
    if found:
        there += machine_checks.gpu_memory(found, plan)
        there += machine_checks.host_memory(found, config, machine)
    history, copied = history_room.check(config)
    there += machine_checks.disk(config, found, copied)
    there += machine_checks.weights(config, plan, found)
    there += machine_checks.ranker(config)
    there += history
    if dry_run or not with_doctor:
        there += machine_checks.history_folder(config)
    checks: list[Check] = []
    if dry_run:
        checks = doctor.versions()
    elif with_doctor:
        checks = doctor.examine(machine_checks.history_dir(config), engines=False)
    if dry_run:
        checks, there = (
            [replace(check, status=WARN) if check.status == FAIL else check for check in part]
            for part in (checks, there)
        )
    checks += config_checks.rhyme(config)
    checks += config_checks.types(config)
    checks += config_checks.trainer_mode(config)
    if with_doctor and not dry_run:
        checks += config_checks.agent_loops(config)
    checks += config_checks.loss(config)
    checks += config_checks.placement(config, plan)
    checks += config_checks.weights(config)
    checks += config_checks.parallel(plan, model)
    checks += config_checks.batches(config, plan)
    checks += config_checks.load(config, plan)
    checks += config_checks.rollout(config, plan)
    checks += run_folder.check(config, notes)
    checks += there
    if not found and model:
        known = ", ".join(ENGINES)
        checks.append(Check("memory", WARN, f"strategy {plan.strategy}: not estimated (known: {known})", "none needed"))
    checks.sort(key=lambda check: (FAIL, WARN, OK).index(check.status))
    return Preflight(checks, plan, found, machine)
