"""All checks of a run before it starts, for recipes, run scripts and a user's own command; problems have remedies.

:mod:`.config_checks` check the config alone, :mod:`.datasets` and :mod:`.components` the files that it names,
:mod:`.machine_checks` compare it with this machine. Where the run may be on another machine, files, machine checks and
versions warn instead of failing. Another run's checkpoints in the run folder always fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks import doctor, loss
from verl_rhyme.checks.doctor import FAIL, OK, WARN, Check
from verl_rhyme.checks.preflight import (
    components,
    config_checks,
    datasets,
    drafter,
    history_size,
    machine_checks,
    run_folder,
    unknown_keys,
    values,
)
from verl_rhyme.checks.preflight.estimate import Estimate, estimate
from verl_rhyme.checks.preflight.machine import ADDRESS, Machine, detect_machine
from verl_rhyme.checks.preflight.plan import ENGINES, Plan, read


@dataclass(frozen=True)
class Preflight:
    """Result of :func:`examine`."""

    checks: list[Check]  # failures, then warnings, then passed checks
    plan: Plan
    estimate: Estimate | None  # ``None`` where the model or the strategy is unknown; a check reports the reason
    machine: Machine

    @property
    def draft_tokens(self) -> int:
        """Most draft tokens of a request in a step; 0 without drafts."""
        return self.estimate.serving.draft_tokens if self.estimate else self.plan.rollout.draft_tokens


def examine(
    config: Any, elsewhere: bool = False, imports: bool = True, notes: Mapping[str, str] | None = None
) -> Preflight:
    """Run all checks of a resolved config (:func:`verl_rhyme.checks.preflight.compose.compose`) on this machine.

    For a run ``elsewhere``, checks of this machine warn. ``imports`` lets verl, vLLM and the training engine be
    imported, unless a quicker check fails: 20 to 45 s. ``notes`` are those of :func:`.run_folder.describe`. Raises
    ConfigError if a size is not a number in its range, ValueError if ``GPU_MEMORY_GB`` is not a number.
    """
    values.check(config)
    machine = detect_machine()
    model_check, fields, model = machine_checks.model(config)
    plan = read(config, fields)
    memory = machine.host_bytes if plan.device == "cpu" else machine.gpu_bytes
    drafter_checks, drafter_sizes = drafter.check(plan, fields, model)
    found = estimate(model, plan, memory, drafter_sizes) if model else None
    checks = [
        *config_checks.rhyme(config, plan),
        *unknown_keys.check(config, plan.rhyme),
        *values.choices(config),
        *components.reward(config),
        *loss.warnings(config, plan.rules),
        *config_checks.weights(config),
        *config_checks.parallel(config, plan, model),
        *config_checks.batches(config, plan),
        *config_checks.load(config, plan),
        *config_checks.rollout(config, plan),
        *config_checks.drafts(config, plan, fields, found.serving if found else None),
        *run_folder.check(config, notes),
        *run_folder.resume(config),
    ]
    history, copied = history_size.check(config, plan)
    folder = machine_checks.history_dir(plan)
    here = [
        *datasets.check(config),
        *components.check(config),
        *model_check,
        *machine_checks.adapters(config),
        *drafter_checks,
        *machine_checks.gpus(plan, machine, OmegaConf.select(config, ADDRESS)),
        *(machine_checks.gpu_memory(found, plan) if found else ()),
        *((machine_checks.host_memory(found, config, machine),) if found else ()),
        *machine_checks.disk(config, found, copied),
        *machine_checks.weights(config, plan, found),
        *machine_checks.ranker(plan),
        *history,
    ]
    unknown = f"no memory estimate for strategy {plan.strategy} (only for {', '.join(ENGINES)})"
    checks += doctor.problems("memory", (model and not found, unknown, "none needed"), status=WARN)
    if not imports:
        here += [
            *machine_checks.engine(config, plan, imports=False),
            *doctor.versions(),
            *doctor.shared_memory(),
            *(doctor.history_folder(folder) if plan.rhyme is not None else ()),
        ]
    elif any(check.status == FAIL for check in (*checks, *here)):
        checks.append(Check("installation", WARN, "not checked because of the failures", "verl-rhyme doctor"))
    else:
        checks += [
            *config_checks.agent_loops(config, plan.rhyme),
            *machine_checks.engine(config, plan, imports=True),
            *doctor.examine(folder, engines=False),
        ]
    checks += [replace(check, status=WARN) if elsewhere and check.status == FAIL else check for check in here]
    checks.sort(key=lambda check: (FAIL, WARN, OK).index(check.status))
    return Preflight(checks, plan, found, machine)
