"""One dictionary of metrics per step, from the event log and from verl's ``file`` logger alike."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import events, metrics, slot_time

#: Step number (from 1) to metric name to value.
Steps = dict[int, dict[str, Any]]

#: verl's ``file`` logger's, in a run folder.
METRICS_FILE = "metrics.jsonl"
#: Below a run folder, where the recipes have hydra write a run's config.
CONFIG_FILE = Path("hydra", ".hydra", "config.yaml")

#: Mean reward of a step by the event log; verl's metrics have other names for it.
EVENT_REWARD = "events/reward_mean"


def parse_lines(lines: Iterable[bytes | str], source: object) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines of verl's ``file`` logger, ``{"step": int, "data": {name: value}}``; others warn and are left out."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            step, data = int(row["step"]), dict(row["data"])
            if metrics.EPOCH in data and metrics.finite(data, metrics.EPOCH) is None:
                raise ValueError(f"{metrics.EPOCH} is {data[metrics.EPOCH]!r}")
            yield step, data
        except (ValueError, OverflowError, KeyError, TypeError) as error:
            warnings.warn(f"{source}, line {number} is no metrics line and is left out ({error})", stacklevel=2)


def metric_files(path: str | os.PathLike[str]) -> list[Path]:
    """``metrics.jsonl`` and what :func:`set_aside` made of its predecessors, oldest first."""
    current = Path(path)
    name = re.compile(re.escape(current.stem) + r"-(\d+)" + re.escape(current.suffix))
    siblings = sorted(current.parent.iterdir()) if current.parent.is_dir() else []
    old = [(int(match[1]), file) for file in siblings if (match := name.fullmatch(file.name))]
    return [file for _, file in sorted(old)] + ([current] if current.is_file() else [])


def set_aside(path: str | os.PathLike[str]) -> Path | None:
    """Rename an earlier run's metrics, since verl's logger empties the file when a run resumes; the new name."""
    current = Path(path)
    if not current.is_file() or current.stat().st_size == 0:
        return None
    taken = [int(file.stem.rsplit("-", 1)[1]) for file in metric_files(current) if file != current]
    aside = current.with_name(f"{current.stem}-{max(taken, default=0) + 1:03d}{current.suffix}")
    current.rename(aside)
    return aside


def from_metrics(path: str | os.PathLike[str]) -> Steps:
    """Training steps in verl's metrics file and its set-aside predecessors.

    A later file that begins at step k replaces all that earlier ones say of k and after it.
    """
    steps: Steps = {}
    for file in metric_files(path):
        rows = [(step, data) for step, data in parse_lines(file.read_bytes().splitlines(), file) if _is_training(data)]
        begin = min((step for step, _ in rows), default=0)
        if rows:
            steps = {step: data for step, data in steps.items() if step < begin}
        for step, data in rows:
            steps.setdefault(step, {}).update(data)
    return steps


def from_log(log: events.Log, slots: int | None, rollout: str = "gen") -> Steps:
    """The same metrics computed from the event log.

    Args:
        log: Of a run.
        slots: See :func:`~verl_rhyme.observability.metrics.bubble_ratio`.
        rollout: The stage that lasts as long as a step's rollout.
    """
    steps: Steps = {}
    stages = events.to_numpy(log.stages)
    for step, epoch, stage, seconds in zip(*(stages[n] for n in ("step", "epoch", "stage", "duration_s")), strict=True):
        data = steps.setdefault(int(step), {metrics.EPOCH: int(epoch)})
        name = metrics.TIMING + str(stage)
        data[name] = data.get(name, 0.0) + float(seconds)

    requests = events.to_numpy(log.requests.drop_columns(["uid", "prompt_key", "node", "reason", "stop_reason"]))
    requests["group"] = events.groups_of(log.requests)
    versioned = log.requests["policy_version_end"].null_count < log.requests.num_rows
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
        if versioned and trained.any():
            data |= _staleness(int(step) - 1, rows, trained)
    for number, bubble in bubbles.items():
        steps[number][metrics.BUBBLE_RATIO] = bubble
    return steps


def _staleness(version: int, rows: dict[str, Any], trained: Any) -> dict[str, float]:
    """``training/staleness/*`` of a step that trained the policy ``version``, by its trained requests."""
    stale = version - rows["policy_version_end"][trained]
    groups, group = np.unique(rows["group"][trained], return_inverse=True)
    oldest = np.full(len(groups), stale.min())
    np.maximum.at(oldest, group, stale)
    return metrics.staleness_metrics(oldest, stale, rows["response_tokens"][trained])


def merge(logged: Steps, computed: Steps) -> Steps:
    """What verl logged, completed by what the events tell of the same steps.

    Steps that only the events know are kept when nothing was logged at all: otherwise they are steps that were
    not finished.
    """
    if not logged:
        return dict(sorted(computed.items()))
    return {step: {**computed.get(step, {}), **data} for step, data in sorted(logged.items())}


def _is_training(data: dict[str, Any]) -> bool:
    return metrics.EPOCH in data
