"""What a real run's trainer took between the rollouts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import theilslopes

from verl_rhyme.observability.slot_time import TRAINING_STAGES
from verl_rhyme.planning.cost import TrainingCost
from verl_rhyme.simulation.recorded import Run, RunError

#: Stages that are within a step and not in an update.
_NO_UPDATE = ("gen", "update_weights", "save_checkpoint", "testing")
_LOGPROBS = ("old_log_prob", "ref")
#: Steps below which nothing is said of what grows with their tokens.
_LINE = 4


class _Stage(NamedTuple):
    name: str
    began: float
    seconds: float

    @property
    def ended(self) -> float:
        return self.began + self.seconds


def training(run: Run) -> TrainingCost:
    """What the trainer took.

    The first step of the log, in which everything is warmed up, counts only where there is no other. Checkpoints and
    validation are no part of it.

    Raises:
        RunError: The log tells no stage, or updates came in parts.
    """
    found = _steps(run)
    whole = [step for step in sorted(found) if {"gen", "step"} <= {stage.name for stage in found[step]}]
    whole = whole[1:] or whole
    if not whole:
        raise RunError(f"{run.folder}: no step tells how long its stages took")
    started = np.sort(run.requests["started_at"][np.isfinite(run.requests["started_at"])])
    tokens, update, logprobs, sync, reward, start = [], [], [], [], [], []
    for step in whole:
        stages = found[step]
        collected = max(stage.ended for stage in stages if stage.name == "gen")
        if any(stage.ended < collected for stage in stages if stage.name in TRAINING_STAGES):
            raise RunError(f"{run.folder}: its updates came in parts: profile a run with streaming.part=null")
        of = run.requests["trained"] & ~run.requests["validate"] & (run.requests["step"] == step)
        tokens.append(float((run.requests["prompt_tokens"] + run.requests["response_tokens"])[of].sum()))
        update.append(max(0.0, _spent(stages, "step") - _spent(stages, *_NO_UPDATE)))
        if trained := _spent(stages, *TRAINING_STAGES):
            logprobs.append(_spent(stages, *_LOGPROBS) / trained)
        if np.isfinite(finished := run.requests["finished_at"][of]).any():
            last = float(np.nanmax(finished))
            if last >= collected - _spent(stages, "gen"):  # else the batch was there before the trainer was
                reward.append(collected - last)
        if synced := [stage.ended for stage in stages if stage.name == "update_weights"]:
            sync.append(_spent(stages, "update_weights"))
            after = started[np.searchsorted(started, max(synced)) :]
            if len(after) and step + 1 in found:
                start.append(float(after[0]) - max(synced))
    slope, at_zero = 0.0, _median(update)
    if len(tokens) >= _LINE and len({*tokens}) > 1:
        line = theilslopes(update, tokens)
        if line.low_slope > 0:  # they clearly grow with their tokens
            slope, at_zero = float(line.slope), max(0.0, float(line.intercept))
    around = {"sync": _median(sync), "reward": max(0.0, _median(reward)), "start": _median(start)}
    if any(logprobs):
        around["logprobs"] = _median(logprobs)
    return TrainingCost(token=slope, update=at_zero, **around)


def _steps(run: Run) -> dict[int, list[_Stage]]:
    found: dict[int, list[_Stage]] = {}
    columns = (run.stages[name].tolist() for name in ("step", "stage", "started_at", "duration_s"))
    for step, name, began, seconds in zip(*columns, strict=True):
        found.setdefault(int(step), []).append(_Stage(str(name), float(began), float(seconds)))
    return found


def _spent(stages: list[_Stage], *names: str) -> float:
    return sum(stage.seconds for stage in stages if stage.name in names)


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else 0.0
