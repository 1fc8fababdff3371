"""Metrics by step, from the event log and from verl's ``file`` logger."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import events, metrics, slot_time

#: Step number (from 1) to metric name to value.
Steps = dict[int, dict[str, Any]]

#: File of verl's ``file`` logger in a run folder.
METRICS_FILE = "metrics.jsonl"
#: Config that hydra writes below a run folder, in the recipes.
CONFIG_FILE = Path("hydra", ".hydra", "config.yaml")

#: Mean reward of a step from the event log; verl's metrics have other names for it.
EVENT_REWARD = "events/reward_mean"


def parse_lines(lines: Iterable[bytes | str], source: object) -> Iterator[tuple[int, dict[str, Any]]]:
    """Parse lines of verl's ``file`` logger, ``{"step": int, "data": {name: value}}``; skip others with a warning."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield int(row["step"]), dict(row["data"])
        except (ValueError, KeyError, TypeError) as error:
            warnings.warn(f"{source}, line {number} is not a line of metrics and is skipped ({error})", stacklevel=2)


def from_metrics(path: str | os.PathLike[str]) -> Steps:
    """Read the training steps of verl's metrics file. A resumed run appends to it; its steps replace earlier ones from
    its first step on.
    """
    steps: Steps = {}
    file = Path(path)
    for step, data in parse_lines(file.read_bytes().splitlines() if file.is_file() else (), file):
        if metrics.EPOCH not in data:  # of a validation
            continue
        while steps and next(reversed(steps)) > step:
            steps.popitem()
        steps.setdefault(step, {}).update(data)
    return steps


def from_log(log: events.Log) -> Steps:
    steps: Steps = {}
    slots, rollout = log.info.get("slots"), log.info.get("rollout") or "gen"
    stages, requests = log.stages, log.requests
    for step, epoch, stage, seconds in zip(*(stages[n] for n in ("step", "epoch", "stage", "duration_s")), strict=True):
        data = steps.setdefault(int(step), {metrics.EPOCH: int(epoch)})
        name = metrics.TIMING + str(stage)
        data[name] = data.get(name, 0.0) + float(seconds)

    bubbles: dict[int, float] = {}
    runs_on = rollout == "step"
    if runs_on and slots and (measured := slot_time.measure(requests, stages, slots, runs_on)) is not None:
        bubbles = {window.step: window.bubble(slots) for window in measured.windows}
    train = np.flatnonzero(~requests["validate"])
    train = train[np.argsort(requests["step"][train], kind="stable")]
    requests = {name: values[train] for name, values in requests.items()}
    numbers, begins = np.unique(requests["step"], return_index=True)
    for step, begin, end in zip(numbers, begins, np.append(begins, len(train))[1:], strict=True):
        rows = {name: values[begin:end] for name, values in requests.items()}
        data = steps.setdefault(int(step), {metrics.EPOCH: int(rows["epoch"][0])})
        rollout_s = metrics.finite(data, metrics.TIMING + rollout)
        if rollout_s is not None:
            data[metrics.ROLLOUT_S] = rollout_s
        data |= metrics.step_metrics(rows, None if runs_on else slots, rollout_s or 0.0)
        if rollout_s is None:
            data.pop(metrics.USEFUL_TOKENS_PER_S, None)
        trained = rows["trained"]
        rewards = rows["reward"][trained & np.isfinite(rows["reward"])]
        if len(rewards):
            data[EVENT_REWARD] = float(rewards.mean())
        if log.versioned and trained.any():
            data |= _staleness(int(step) - 1, rows, trained)
    for number, bubble in bubbles.items():
        steps[number][metrics.BUBBLE_RATIO] = bubble
    return steps


def _staleness(version: int, rows: dict[str, Any], trained: Any) -> dict[str, float]:
    stale = version - rows["policy_version_end"][trained]
    groups, group = np.unique(rows["group"][trained], return_inverse=True)
    oldest = np.full(len(groups), stale.min())
    np.maximum.at(oldest, group, stale)
    return metrics.staleness_metrics(oldest, stale, rows["response_tokens"][trained])


def merge(logged: Steps, computed: Steps, log: events.Log) -> Steps:
    """Merge verl's metrics, of its file and of the event log (which takes precedence), with ``computed`` ones, which
    yield to both. Steps without logged ones are unfinished: they are dropped unless no step has them.
    """
    finished = {step: {**logged.get(step, {}), **log.metrics.get(step, {})} for step in {*logged, *log.metrics}}
    if not finished:
        return dict(sorted(computed.items()))
    return {step: {**computed.get(step, {}), **data} for step, data in sorted(finished.items())}
