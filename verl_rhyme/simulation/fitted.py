"""Costs fitted to a run's event log: a profile of its replicas, costs of the trainer, and acceptance lengths."""

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
    """Costs fitted to a run.

    Attributes:
        source: Run, engine, date, and error of the fit.
        steps: Fitted step costs of the replicas.
        cost: Costs of a replica, with its slots, KV cache and GPUs.
        training: Costs of the trainer.
        drafts: Acceptance lengths.
        notes: Values missing in the log.
    """

    source: str
    steps: StepFit
    cost: ReplicaCost
    training: TrainingCost
    drafts: Drafts
    notes: list[str]


def fit(run: Run, name: str) -> Fitted:
    """Fit costs to a run. Raises RunError if its log is too short, or lacks the times of requests."""
    try:
        steps = fit_steps(recorded.requests(run))
    except FitError as error:
        raise RunError(f"{run.folder}: {error}") from error
    notes = list(run.unread)
    try:
        training = fit_training(run)
    except RunError as error:
        training = TrainingCost()
        notes.append(f"the costs of the trainer are unknown: {error}")
    replica = run.info.get("replica")
    sizes = dict(replica) if isinstance(replica, dict) else {}
    if not (slots := int(sizes.get("slots") or 0)):
        slots = ReplicaCost.slots
        notes.append(f"the log does not have max_num_seqs: the profile has {slots} slots, vLLM's default")
    room, gpus = float(sizes.get("room") or math.inf), int(sizes.get("gpus") or 1)
    cost = ReplicaCost(steps.step, steps.prefill, slots=slots, room=room, gpus=gpus)
    date = time.strftime("%Y-%m-%d", time.gmtime(float(np.nanmax(run.requests["finished_at"]))))
    source = (
        f"measured: {name}, {run.info.get('engine', 'an unknown engine')}, {date}; error of the seconds of "
        f"{steps.requests} requests: median {steps.error:.1%}, 90th percentile {steps.worst:.1%}"
    )
    return Fitted(source, steps, cost, training, recorded.acceptance(run), notes)


def yaml(fitted: Fitted) -> str:
    """Return the profile file for ``verl-rhyme simulate``, with trainer and drafts for a cluster file as a comment."""
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
        "# Measured by verl-rhyme profile. Costs are in seconds.\n"
        f"# Trainer of the same run, for a cluster file:\n{comment}{OmegaConf.to_yaml(profile)}"
    )


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
