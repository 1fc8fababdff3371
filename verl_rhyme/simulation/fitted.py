"""What a run's log tells of its machine: a profile of its replicas, the trainer's costs, what drafting gained."""

from __future__ import annotations

import json
import math
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_rhyme.config import PIPELINES
from verl_rhyme.planning.cost import ReplicaCost, TrainingCost
from verl_rhyme.planning.cost_fit import FitError, StepFit, fit_steps
from verl_rhyme.simulation import recorded
from verl_rhyme.simulation.recorded import Run, RunError
from verl_rhyme.simulation.recorded_training import Training
from verl_rhyme.simulation.recorded_training import training as fit_training
from verl_rhyme.simulation.scenario import Drafts

_UNITS = {"base": "a step", "row": "a request in it", "cached": "a token in its KV caches", "draft": "a draft token"}
_UNITS |= {"drafting": "drafting at all", "prefill": "a prompt token"}
_TRAINING = {"token": "a token trained", "logprobs": "that, the share that is log-probs", "update": "an update"}
_TRAINING |= {"part": "a part that came before its batch was whole", "sync": "new weights", "reward": "a reward"}
_TRAINING |= {"start": "new weights to the first request"}


@dataclass(frozen=True)
class Fitted:
    """Attributes:
    run: Of which.
    steps: Of its replicas.
    cost: The same, with sizes: a replica's slots, the room of its KV cache, its GPUs.
    training: Its trainer.
    training_error: Median relative error of its updates.
    gradients: Of parts were taken before their batch was whole; ``None``: its log has no parts.
    drafts: Its acceptance lengths.
    notes: What the log does not tell.
    date: Of its latest request.
    """

    run: Run
    steps: StepFit
    cost: ReplicaCost
    training: TrainingCost
    training_error: float
    gradients: bool | None
    drafts: Drafts
    notes: list[str]
    date: str


def fit(run: Run) -> Fitted:
    """See the module.

    Raises:
        RunError: The log is too short, or does not tell what it takes.
    """
    requests = recorded.requests(run)
    try:
        steps = fit_steps(requests)
    except FitError as error:
        raise RunError(f"{run.folder}: {error}") from error
    notes = list(run.unread)
    try:
        training = fit_training(run)
    except RunError as error:
        training = Training(TrainingCost(), math.nan, None)
        notes.append(f"nothing is known of the trainer: {error}")
    told = run.info.get("replica")
    sizes = dict(told) if isinstance(told, dict) else {}
    slots = int(sizes.get("slots") or 0)
    replicas = len(np.unique(run.requests["replica"]))
    if not slots and (all_slots := int(run.info.get("slots") or 0)) >= replicas:
        slots = all_slots // replicas  # as many as samples could be in flight, at most max_num_seqs
    if not slots:
        slots = recorded.most_at_a_time(requests)
        notes.append(f"its log does not tell max_num_seqs: {slots} slots are the most that it had in use")
    cost = ReplicaCost(
        steps.step,
        steps.prefill,
        slots=slots,
        room=float(sizes.get("room") or math.inf),
        gpus=int(sizes.get("gpus") or 1),
    )
    latest = float(np.nanmax(run.requests["finished_at"]))
    date = time.strftime("%Y-%m-%d", time.gmtime(latest))
    return Fitted(run, steps, cost, *training, recorded.acceptance(run), notes, date)


def rows(fitted: Fitted) -> list[tuple[str, str, str, str]]:
    """Of a table: coefficient, seconds, standard error, what it is of or why it is not known."""
    steps = fitted.steps
    values = {**asdict(steps.step), "prefill": steps.prefill}
    told = []
    for name, of in _UNITS.items():
        if name in steps.untold:
            told.append((name, "0", "", f"not told: {steps.untold[name]}"))
        else:
            told.append((name, f"{values[name]:.3g}", f"{steps.errors[name]:.1g}", f"of {of}"))
    training = _seconds(fitted.training)
    return told + [(f"training.{name}", f"{training[name]:.3g}", "", f"of {of}") for name, of in _TRAINING.items()]


def lines(fitted: Fitted) -> list[str]:
    """How good it is, in words."""
    steps = fitted.steps
    told = [
        f"{steps.requests} requests: their seconds are off by {steps.error:.1%} in the median, a tenth by more than "
        f"{steps.worst:.1%}"
        + ("" if math.isnan(fitted.training_error) else f"; updates by {fitted.training_error:.1%}")
    ]
    usual = float(np.median(list(steps.pace.values()))) if steps.pace else 1.0
    slow = {replica: pace / usual for replica, pace in steps.pace.items() if pace / usual - 1 > _UNEVEN}
    if slow:
        each = ", ".join(f"replica {replica} {pace:.2f}" for replica, pace in slow.items())
        told.append(f"slower than the median replica (their seconds as a multiple of its): {each}")
    if len(fitted.drafts.acceptance) > 1 or fitted.drafts.acceptance[0] > 1:
        paces = ", ".join(f"{pace:.2f}" for pace in fitted.drafts.acceptance)
        told.append(
            f"tokens a decoding step by visits of a prompt: {paces}; {fitted.drafts.overhead:.1f} draft tokens for "
            "each gained"
        )
    return told + fitted.notes


#: Of all replicas' seconds, from which one is told to be another.
_UNEVEN = 0.1


def yaml(fitted: Fitted, source: str) -> str:
    """A profile as ``verl-rhyme simulate`` reads it; for the cluster file it has trainer and drafts as a comment."""
    cost = fitted.cost
    profile: dict[str, Any] = {
        "source": source,
        "fit": {
            "date": fitted.date,
            "requests": fitted.steps.requests,
            "error": _digits(fitted.steps.error),
            "worst": _digits(fitted.steps.worst),
        },
        "gpus": cost.gpus,
        "slots": cost.slots,
        **({"room": cost.room} if math.isfinite(cost.room) else {}),
        "prefill": _digits(cost.prefill),
        "step": {name: _digits(value) for name, value in asdict(cost.step).items()},
    }
    around: dict[str, Any] = {"training": _seconds(fitted.training)}
    if fitted.drafts != Drafts():
        paces = [_digits(pace) for pace in fitted.drafts.acceptance]
        around["drafts"] = {"acceptance": paces, "overhead": _digits(fitted.drafts.overhead)}
    comment = "".join(f"#   {line}\n" for line in OmegaConf.to_yaml(around).splitlines())
    return (
        "# Measured by verl-rhyme profile. Seconds each; docs/simulation.md says of what.\n"
        f"# The same run's trainer, for a cluster file:\n{comment}{OmegaConf.to_yaml(profile)}"
    )


def cluster(fitted: Fitted, profile: Path) -> str:
    """A cluster file beside the profile that plays the run again, on one line each; what the log does not tell of its
    rules is left to who ran it."""
    run = fitted.run
    trained = run.requests["trained"] & ~run.requests["validate"]
    groups = {
        (int(step), uid) for step, uid in zip(run.requests["step"][trained], run.requests["uid"][trained], strict=True)
    }
    by_step = np.unique([step for step, _ in groups], return_counts=True)[1]
    arms = run.info.get("arms")
    arm = str(arms[-1][-1]) if isinstance(arms, list) and arms else ""
    preset, _, differs = arm.partition("-")
    separate = preset == "stream" or run.info.get("rollout") == "step" or fitted.gradients is not None
    options: dict[str, Any] = {}
    if preset in PIPELINES:
        bound = re.match(r"k(\d+)", differs)
        options = {"preset": preset} | ({"max_staleness": int(bound[1])} if bound else {})
        if separate and fitted.gradients is None:
            options["streaming"] = {"part": None}
    told: dict[str, Any] = {
        "replicas": [{"count": len(np.unique(run.requests["replica"])), "profile": profile.name}],
        "workload": {"lengths": {"run": os.path.relpath(run.folder, profile.parent)}},
        "topology": "separate" if separate else "colocated",
        "batch_prompts": int(np.median(by_step)) if len(by_step) else 1,
        **options,
        "training": _seconds(fitted.training),
    }
    if fitted.gradients is False:
        told["training"]["gradients"] = False
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in told.items())


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _seconds(training: TrainingCost) -> dict[str, float]:
    """Of what the log tells."""
    return {name: _digits(value) for name, value in asdict(training).items() if value is not None}
