"""Costs of a real run's trainer, from its event log."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import theilslopes

from verl_rhyme.observability.slot_time import TRAINING_STAGES
from verl_rhyme.planning.cost import TrainingCost
from verl_rhyme.simulation.recorded import Run, RunError

#: Stages of a step that are no training.
_NO_UPDATE = ("gen", "update_weights", "save_checkpoint", "testing")
_LOGPROBS = ("old_log_prob", "ref")
#: Minimum steps for a cost per token.
_LINE = 4


class _Stage(NamedTuple):
    name: str
    began: float
    seconds: float

    @property
    def ended(self) -> float:
        return self.began + self.seconds


def training(run: Run) -> TrainingCost:
    """Return the trainer's costs.

    The first step of the log includes warm-up: it counts only if it is the only one. Checkpoints and validation do not
    count.

    Raises:
        RunError: The log has no stages, or batches were trained in parts.
    """
    by_step = _steps(run)
    whole = [step for step in sorted(by_step) if {"gen", "step"} <= {stage.name for stage in by_step[step]}]
    whole = whole[1:] or whole
    if not whole:
        raise RunError(f"{run.folder}: no step has the durations of its stages")
    started = np.sort(run.requests["started_at"][np.isfinite(run.requests["started_at"])])
    tokens, update, logprobs, sync, reward, start = [], [], [], [], [], []
    for step in whole:
        stages = by_step[step]
        collected = max(stage.ended for stage in stages if stage.name == "gen")
        if any(stage.ended < collected for stage in stages if stage.name in TRAINING_STAGES):
            raise RunError(f"{run.folder}: batches were trained in parts: profile a run with rhyme.streaming.part=null")
        of = run.requests["trained"] & ~run.requests["validate"] & (run.requests["step"] == step)
        tokens.append(float((run.requests["prompt_tokens"] + run.requests["response_tokens"])[of].sum()))
        update.append(max(0.0, _spent(stages, "step") - _spent(stages, *_NO_UPDATE)))
        if trained := _spent(stages, *TRAINING_STAGES):
            logprobs.append(_spent(stages, *_LOGPROBS) / trained)
        if np.isfinite(finished := run.requests["finished_at"][of]).any():
            last = float(np.nanmax(finished))
            if last >= collected - _spent(stages, "gen"):  # else the batch was complete before the trainer waited
                reward.append(collected - last)
        if synced := [stage.ended for stage in stages if stage.name == "update_weights"]:
            sync.append(_spent(stages, "update_weights"))
            after = started[np.searchsorted(started, max(synced)) :]
            if len(after) and step + 1 in by_step:
                start.append(float(after[0]) - max(synced))
    slope, at_zero = 0.0, _median(update)
    if len(tokens) >= _LINE and len({*tokens}) > 1:
        line = theilslopes(update, tokens)
        if line.low_slope > 0:  # the seconds clearly grow with the tokens
            slope, at_zero = float(line.slope), max(0.0, float(line.intercept))
    around = {"sync": _median(sync), "reward": max(0.0, _median(reward)), "start": _median(start)}
    if any(logprobs):
        around["logprobs"] = _median(logprobs)
    return TrainingCost(token=slope, update=at_zero, **around)


def _steps(run: Run) -> dict[int, list[_Stage]]:
    by_step: dict[int, list[_Stage]] = {}
    columns = (run.stages[name].tolist() for name in ("step", "stage", "started_at", "duration_s"))
    for step, name, began, seconds in zip(*columns, strict=True):
        by_step.setdefault(int(step), []).append(_Stage(str(name), float(began), float(seconds)))
    return by_step


def _spent(stages: list[_Stage], *names: str) -> float:
    return sum(stage.seconds for stage in stages if stage.name in names)


def _median(values: list[float]) -> float:
    return float(np.median(values)) if values else 0.0
