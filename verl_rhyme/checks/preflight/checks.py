"""All checks of a run before it starts; each problem comes with a remedy.

:mod:`.config_checks` check the config alone, :mod:`.machine_checks` compare it with this machine. A dry run may be on
another machine than the run, so its machine checks and versions warn instead of failing. Another run's checkpoints in
the run folder fail in a dry run as well.
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
    """Result of a preflight.

    Attributes:
        checks: Findings: failures, then warnings, then passed checks.
        plan: Plan of the run.
        estimate: Memory estimate, ``None`` where the model or the strategy is unknown; a check reports the reason.
        machine: This machine.
    """

    checks: list[Check]
    plan: Plan
    estimate: Estimate | None
    machine: Machine

    @property
    def failed(self) -> int:
        """Number of failures, which would stop the run."""
        return sum(check.status == FAIL for check in self.checks)


def examine(
    config: Any, dry_run: bool = False, with_doctor: bool = True, notes: Mapping[str, str] | None = None
) -> Preflight:
    """Run all checks of a resolved config on this machine.

    Args:
        config: Config from :func:`verl_rhyme.checks.preflight.compose.compose`.
        dry_run: Whether machine checks warn instead of failing, and the doctor checks versions only.
        with_doctor: Whether to check Python, packages, plugin and patches; takes 20 to 45 s unless ``dry_run``.
        notes: Notes of :func:`verl_rhyme.checks.preflight.run_folder.describe`.

    Raises:
        ConfigError: A size is not a number.
        ValueError: ``GPU_MEMORY_GB`` is not a number.
    """
    check_numbers(config)
    machine = look()
    model_check, fields, model = machine_checks.model(config)
    positions = fields.get("max_position_embeddings")
    plan = read(config, positions)
    memory = machine.host_bytes if plan.device == "cpu" else machine.gpu_bytes
    found = estimate(model, plan, memory) if model else None
    on_machine: list[Check] = [
        *machine_checks.datasets(config),
        *model_check,
        *machine_checks.reward_function(config, load=with_doctor and not dry_run),
        *machine_checks.engine(config, plan, load=with_doctor and not dry_run),
        *machine_checks.gpus(plan, machine),
    ]
    if found:
        on_machine += machine_checks.gpu_memory(found, plan)
        on_machine += machine_checks.host_memory(found, config, machine)
    history, copied = history_room.check(config)
    on_machine += machine_checks.disk(config, found, copied)
    on_machine += machine_checks.weights(config, plan, found)
    on_machine += machine_checks.ranker(config)
    on_machine += history
    if dry_run or not with_doctor:
        on_machine += machine_checks.history_folder(config)
    checks: list[Check] = []
    if dry_run:
        checks = doctor.versions()
    elif with_doctor:
        checks = doctor.examine(machine_checks.history_dir(config), engines=False)
    if dry_run:
        checks, on_machine = (
            [replace(check, status=WARN) if check.status == FAIL else check for check in part]
            for part in (checks, on_machine)
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
    checks += on_machine
    if not found and model:
        known = ", ".join(ENGINES)
        detail = f"the memory of strategy {plan.strategy} is not estimated (known: {known})"
        checks.append(Check("memory", WARN, detail, "none needed"))
    checks.sort(key=lambda check: (FAIL, WARN, OK).index(check.status))
    return Preflight(checks, plan, found, machine)
