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
from verl_rhyme.checks.preflight import config_checks, history_size, machine_checks, run_folder
from verl_rhyme.checks.preflight.estimate import Estimate, estimate
from verl_rhyme.checks.preflight.machine import Machine, detect_machine
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
    machine = detect_machine()
    model_check, fields, model = machine_checks.model(config)
    plan = read(config, fields.get("max_position_embeddings"))
    memory = machine.host_bytes if plan.device == "cpu" else machine.gpu_bytes
    found = estimate(model, plan, memory) if model else None
    imports = with_doctor and not dry_run
    history, copied = history_size.check(config, plan)
    on_machine: list[Check] = [
        *machine_checks.datasets(config),
        *model_check,
        *machine_checks.reward_function(config, load=imports),
        *(machine_checks.engine(config, plan) if imports else ()),
        *machine_checks.gpus(plan, machine),
        *(machine_checks.gpu_memory(found, plan) if found else ()),
        *(machine_checks.host_memory(found, config, machine) if found else ()),
        *machine_checks.disk(config, found, copied),
        *machine_checks.weights(config, plan, found),
        *machine_checks.ranker(plan),
        *history,
    ]
    if imports:
        on_machine += doctor.examine(machine_checks.history_dir(plan), engines=False)
    elif plan.rhyme is not None:
        on_machine += doctor.history_folder(machine_checks.history_dir(plan))
    if dry_run:
        on_machine += doctor.versions()
        on_machine = [replace(check, status=WARN) if check.status == FAIL else check for check in on_machine]
    checks = [
        *config_checks.rhyme(config, plan),
        *config_checks.types(config),
        *config_checks.trainer_mode(config),
        *(config_checks.agent_loops(config, plan) if imports else ()),
        *config_checks.loss(config, plan),
        *config_checks.placement(plan),
        *config_checks.weights(config),
        *config_checks.parallel(plan, model),
        *config_checks.batches(config, plan),
        *config_checks.load(config, plan),
        *config_checks.rollout(config, plan),
        *run_folder.check(config, notes),
        *run_folder.resume(config),
        *on_machine,
    ]
    if not found and model:
        detail = f"the memory of strategy {plan.strategy} is not estimated (known: {', '.join(ENGINES)})"
        checks.append(Check("memory", WARN, detail, "none needed"))
    checks.sort(key=lambda check: (FAIL, WARN, OK).index(check.status))
    return Preflight(checks, plan, found, machine)
