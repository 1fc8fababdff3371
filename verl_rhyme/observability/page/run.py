"""Logged data of a run, for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from verl_rhyme.observability import events, metrics, slot_time, steps
from verl_rhyme.observability.slot_time import SlotTime


@dataclass
class Run:
    """Run with its logged data."""

    folder: Path
    summary: dict[str, Any]  # of ``summary.read``
    steps: steps.Steps  # metrics by step
    requests: dict[str, np.ndarray] = field(default_factory=dict)  # with ``group``; empty without a log
    stages: dict[str, np.ndarray] = field(default_factory=dict)  # empty without a log
    slot_time: SlotTime | None = None  # ``None`` if the log has no times
    runs_on: bool = False  # whether engines continue while the actor trains
    problems: list[str] = field(default_factory=list)  # missing data, one sentence each

    @property
    def name(self) -> str:
        """Name of the run, unique in the report."""
        return str(self.summary["run"])

    @name.setter
    def name(self, name: str) -> None:
        self.summary["run"] = name

    @property
    def epochs(self) -> Sequence[Mapping[str, Any]]:
        return self.summary["epochs"]

    def by_step(self, *names: str) -> list[tuple[float, float]]:
        values = ((step, metrics.finite(data, *names)) for step, data in self.steps.items())
        return [(float(step), value) for step, value in values if value is not None]

    @cached_property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Predicted and actual tokens of the trained responses that have a prediction. A migrated or interrupted
        response takes several requests: the prediction is that of its first, the actual tokens are those of all.
        """
        if not self.requests:
            return np.zeros(0), np.zeros(0)
        rows = np.flatnonzero(self.requests["trained"])
        keys = [self.requests[name][rows] for name in ("step", "group", "sample")]
        order = np.lexsort((self.requests["started_at"][rows], self.requests["request"][rows], *keys))
        rows = rows[order]
        begins = np.any([np.diff(key[order], prepend=-2) != 0 for key in keys], axis=0)
        real = np.bincount(np.cumsum(begins) - 1, self.requests["response_tokens"][rows])
        first = rows[begins]
        predicted = self.requests["predicted_tokens"][first].astype(np.float64)  # 0: without a prediction
        known = (predicted > 0) & (real > 0)
        logged = np.argsort(first[known])
        return predicted[known][logged], real[known][logged]


def load(folder: Path, summary: dict[str, Any], by_step: steps.Steps, log: events.Log) -> Run:
    """Build a run from its summary and event log; missing data becomes one of its problems, not an error."""
    run = Run(folder, summary, by_step)
    events_folder, info = log.folder, log.info
    if not events_folder.is_dir():
        run.problems.append(f"{folder} has no event log (events/ next to its checkpoints), so there are no lanes")
        return run
    if not len(log.requests["step"]):
        run.problems.append(f"the event log {events_folder} has no requests, so there are no lanes")
        return run
    run.requests, run.stages = log.requests, log.stages
    run.runs_on = info.get("rollout") == "step"
    slots = info.get("slots")
    if slots is None:
        run.problems.append(
            f"{events_folder / events.INFO_FILE} does not contain the request slots: lanes are as high as the most "
            "requests that ran at a time, and there is no bubble ratio"
        )
    if not len(log.stages["step"]):
        run.problems.append(
            f"the event log {events_folder} has no stages (stages-*.arrow): training and weight sync count as other, "
            "and rollouts are separated only by the steps of their requests"
        )
    run.slot_time = slot_time.measure(run.requests, run.stages, slots, run.runs_on)
    if run.slot_time is None:
        run.problems.append(f"no request of the event log {events_folder} has times, so there are no lanes")
    return run
