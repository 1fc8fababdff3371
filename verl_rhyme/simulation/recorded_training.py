"""What a real run's trainer took between the rollouts and, where its updates came in parts, beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from verl_rhyme.observability.slot_time import TRAINING_STAGES
from verl_rhyme.planning.cost import TrainingCost
from verl_rhyme.planning.cost_fit import fit_line
from verl_rhyme.simulation.recorded import Run, RunError

#: Stages that are within a step and not in an update.
_NO_UPDATE = ("gen", "update_weights", "save_checkpoint", "testing")
_LOGPROBS = ("old_log_prob", "ref")
#: Of a step's longest: what is shorter is no stage of its own, but the mark of one within another.
_MARK = 0.01


class Training(NamedTuple):
    """Attributes:
    cost: What updates, weights and rewards take.
    error: Median relative error of the updates.
    gradients: Of parts were taken before the batch was whole; ``None``: there were no parts.
    """

    cost: TrainingCost
    error: float
    gradients: bool | None


@dataclass
class _Step:
    """A step's stages, in the order of time: name, when each began, and its seconds."""

    stages: list[tuple[str, float, float]]

    def spent(self, *names: str) -> float:
        return sum(seconds for name, _, seconds in self.stages if name in names)

    def ended(self, name: str) -> float:
        return max(began + seconds for stage, began, seconds in self.stages if stage == name)

    def has(self, *names: str) -> bool:
        return {*names} <= {name for name, _, _ in self.stages}

    @property
    def early(self) -> list[tuple[str, float, float]]:
        """Stages of training that began before the batch was whole."""
        whole = self.ended("gen")
        return [stage for stage in self.stages if stage[0] in TRAINING_STAGES and stage[1] < whole]

    @property
    def parts(self) -> list[tuple[float, float]]:
        """When each part was begun, and the seconds that it took."""
        early = self.early
        known = [(began, seconds) for name, began, seconds in early if name == "old_log_prob"]
        longest = max((seconds for _, seconds in known), default=0.0)
        begun = np.array([began for began, seconds in known if seconds > _MARK * longest])
        spent = np.zeros(len(begun))
        for _, began, seconds in early if len(begun) else ():
            spent[max(0, int(np.searchsorted(begun, began, side="right")) - 1)] += seconds
        return list(zip(begun.tolist(), spent.tolist(), strict=True))


def training(run: Run) -> Training:
    """What the trainer took.

    The first step of the log, in which everything is warmed up, counts only where there is no other. Checkpoints and
    validation are no part of it. A group was in the first part that was begun after its last response.

    Raises:
        RunError: The log tells no stage.
    """
    found = _steps(run)
    whole = sorted(step for step, stages in found.items() if stages.has("gen", "step"))
    whole = whole[1:] or whole
    if not whole:
        raise RunError(f"{run.folder}: no step tells how long its stages took")
    started = np.sort(run.requests["started_at"][np.isfinite(run.requests["started_at"])])
    late, start, rest, parts = [], [], [], []
    for step in whole:
        stages = found[step]
        last, tokens = _tokens(run, step, [began for began, _ in stages.parts])
        rest.append((float(tokens[-1]), float(tokens.sum()), stages.spent("step") - stages.spent(*_NO_UPDATE)))
        parts.append([(float(of), seconds) for of, (_, seconds) in zip(tokens, stages.parts, strict=False)])
        free = [stages.ended("gen") - stages.spent("gen"), *(began + took for _, began, took in stages.early)]
        if last >= max(free):  # else the batch was there before the trainer was
            late.append(stages.ended("gen") - last)
        if stages.has("update_weights"):
            synced = stages.ended("update_weights")
            after = started[np.searchsorted(started, synced) :]
            if len(after) and step + 1 in found:
                start.append(float(after[0]) - synced)
    of = [found[step] for step in whole]
    around = {
        "sync": _median([stages.spent("update_weights") for stages in of if stages.has("update_weights")]),
        "reward": max(0.0, _median(late)),
        "start": _median(start),
    }
    known = sum(stages.spent(*_LOGPROBS) for stages in of)
    if known:
        around["logprobs"] = known / sum(stages.spent(*TRAINING_STAGES) for stages in of)
    if not any(parts):
        line = fit_line(*(np.array(values) for values in zip(*((t, max(0.0, s)) for _, t, s in rest), strict=True)))
        return Training(TrainingCost(token=line.slope, update=line.at_zero, **around), line.error, None)
    gradients = any(name == "update_actor" for stages in of for name, _, _ in stages.early)
    line = fit_line(*(np.array(values) for values in zip(*(part for each in parts for part in each), strict=True)))
    ahead = 1.0 if gradients else around.get("logprobs", TrainingCost.logprobs)
    if gradients and line.slope and known:  # what does not grow with tokens is no part of it
        around["logprobs"] = min(1.0, known / (line.slope * sum(total for _, total, _ in rest)))
    cost = TrainingCost(token=line.slope / ahead, part=line.at_zero, **around)
    cost = TrainingCost(
        **{**vars(cost), "update": max(0.0, _median([s - cost.seconds(t, t - r, gradients) for r, t, s in rest]))}
    )
    errors = []
    for (left, total, seconds), each in zip(rest, parts, strict=True):
        took = seconds + sum(spent for _, spent in each)
        told = cost.seconds(total, total - left, gradients) + sum(cost.part_seconds(t, gradients) for t, _ in each)
        errors.append(abs(told / took - 1) if took > 0 else 0.0)
    return Training(cost, _median(errors), gradients)


def _steps(run: Run) -> dict[int, _Step]:
    columns = run.stages
    found: dict[int, _Step] = {}
    for row in np.argsort(columns["started_at"], kind="stable").tolist():
        stage = str(columns["stage"][row]), float(columns["started_at"][row]), float(columns["duration_s"][row])
        found.setdefault(int(columns["step"][row]), _Step([])).stages.append(stage)
    return found


def _tokens(run: Run, step: int, begun: list[float]) -> tuple[float, np.ndarray[Any, Any]]:
    """When a step's last trained response ended, and tokens of prompts and responses: of each part, and of the rest."""
    columns = run.requests
    rows = np.flatnonzero(columns["trained"] & ~columns["validate"] & (columns["step"] == step))
    tokens = (columns["prompt_tokens"] + columns["response_tokens"])[rows].astype(float)
    finished = np.nan_to_num(columns["finished_at"][rows], nan=-np.inf)
    _, group = np.unique(columns["uid"][rows].astype(str), return_inverse=True)
    done = np.full(group.max(initial=-1) + 1, -np.inf)
    np.maximum.at(done, group, finished)
    part = np.searchsorted(begun, done)[group]
    return float(finished.max(initial=-np.inf)), np.bincount(part, tokens, minlength=len(begun) + 1)


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else 0.0
