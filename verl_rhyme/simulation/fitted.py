"""What a run's log tells of its machine: a profile of its replicas, the trainer's costs, what drafting gained."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_rhyme.planning.cost import ReplicaCost, TrainingCost
from verl_rhyme.planning.cost_fit import FitError, StepFit, fit_steps
from verl_rhyme.simulation import recorded
from verl_rhyme.simulation.recorded import Run, RunError
from verl_rhyme.simulation.recorded_training import training as fit_training
from verl_rhyme.simulation.scenario import Drafts


@dataclass(frozen=True)
class Fitted:
    """Attributes:
    source: Which run, which engine, when, and how good the fit is.
    steps: Of its replicas.
    cost: The same, with sizes: a replica's slots, the room of its KV cache, its GPUs.
    training: Its trainer.
    drafts: Its acceptance lengths.
    notes: What the log does not tell.
    """

    source: str
    steps: StepFit
    cost: ReplicaCost
    training: TrainingCost
    drafts: Drafts
    notes: list[str]


def fit(run: Run, name: str) -> Fitted:
    """See the module; ``name`` is the run's.

    Raises:
        RunError: The log is too short, or does not tell what it takes.
    """
    try:
        steps = fit_steps(recorded.requests(run))
    except FitError as error:
        raise RunError(f"{run.folder}: {error}") from error
    notes = list(run.unread)
    try:
        training = fit_training(run)
    except RunError as error:
        training = TrainingCost()
        notes.append(f"nothing is known of the trainer: {error}")
    told = run.info.get("replica")
    sizes = dict(told) if isinstance(told, dict) else {}
    if not (slots := int(sizes.get("slots") or 0)):
        slots = ReplicaCost.slots
        notes.append(f"its log does not tell max_num_seqs: {slots} slots, vLLM's default, stand in the profile")
    room, gpus = float(sizes.get("room") or math.inf), int(sizes.get("gpus") or 1)
    cost = ReplicaCost(steps.step, steps.prefill, slots=slots, room=room, gpus=gpus)
    date = time.strftime("%Y-%m-%d", time.gmtime(float(np.nanmax(run.requests["finished_at"]))))
    source = (
        f"measured: {name}, {run.info.get('engine', 'an unknown engine')}, {date}; seconds of {steps.requests} "
        f"requests off by {steps.error:.1%} in the median, a tenth by more than {steps.worst:.1%}"
    )
    return Fitted(source, steps, cost, training, recorded.acceptance(run), notes)


def yaml(fitted: Fitted) -> str:
    """A profile as ``verl-rhyme simulate`` reads it; for the cluster file it has trainer and drafts as a comment."""
    cost = fitted.cost
    profile: dict[str, Any] = {
        "source": fitted.source,
        "gpus": cost.gpus,
        "slots": cost.slots,
        **({"room": cost.room} if math.isfinite(cost.room) else {}),
        "prefill": _digits(cost.prefill),
        "step": {name: _digits(value) for name, value in asdict(cost.step).items()},
    }
    training = {name: _digits(value) for name, value in asdict(fitted.training).items() if value is not None}
    around: dict[str, Any] = {"training": training}
    if fitted.drafts != Drafts():
        paces = [_digits(pace) for pace in fitted.drafts.acceptance]
        around["drafts"] = {"acceptance": paces, "overhead": _digits(fitted.drafts.overhead)}
    comment = "".join(f"#   {line}\n" for line in OmegaConf.to_yaml(around).splitlines())
    return (
        "# Measured by verl-rhyme profile. Seconds each; docs/studies/simulation.md says of what.\n"
        f"# The same run's trainer, for a cluster file:\n{comment}{OmegaConf.to_yaml(profile)}"
    )


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
