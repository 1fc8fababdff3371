"""Slot time by reason: when request slots were busy, and why they were idle.

Each moment has one reason, which applies to every idle slot of every replica, except those of samples that are between
two turns. A rollout is a window of time:

- Engines that stop while the actor trains (``rollout`` stage ``gen``): from the first start to the last end of the
  requests between two trainings, as in :func:`~verl_rhyme.observability.metrics.bubble_ratio`.
- Engines that continue during training (``step``): from one batch collection to the next. A batch is collected at the
  end of verl's stage ``gen``.

All functions are pure functions of numpy arrays and seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_rhyme.observability.turns import COLUMNS, turns

Array = npt.NDArray[Any]
Columns = Mapping[str, Array]

BUSY, TOOL, TAIL, STARVED, SYNC, TRAINING, OTHER = range(7)
#: Names of the reasons on the page, by number.
REASONS = ("busy", "tool", "tail", "starved", "weight sync", "training", "other")
DEFINITIONS = {
    "busy": "A request runs in the slot.",
    "tool": "A sample is between two turns: its agent loop calls a tool. Each such sample explains one slot that would "
    "otherwise be starved or empty in the tail.",
    "tail": "All requests of the batch have started. Some still run, and no request is left to start before the batch "
    "is collected.",
    "starved": "Requests of the batch have yet to start, but the slot is empty: they wait at another replica, for KV "
    "cache, for their turn, or have not been sent.",
    "weight sync": "Weights are being transferred from the trainer to the engines.",
    "training": "The actor trains (log-probs, advantages, updates). The engines sleep, or may start no request before "
    "they have the new weights.",
    "other": "All other time: start-up, before a rollout's first request and after its last, rewards, validation, "
    "checkpoints.",
}
#: Reasons that a sample between two turns replaces.
_ROLLOUT = (TAIL, STARVED)
#: verl's stages that count as training.
TRAINING_STAGES = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
_STEP, _GEN, _SYNC = "step", "gen", "update_weights"
#: Minimum length of a pause (the run was stopped and resumed): share of the run's time, and seconds.
_PAUSE_SHARE, _PAUSE_S = 0.05, 20.0
#: Most requests of a replica with all its slots in use, over its slots: an engine reuses a slot shortly before the last
#: response has left it.
_FULL = 1.2


@dataclass(frozen=True)
class Window:
    """Window of rollout: its bounds and the last start of a request in it, in seconds."""

    step: int
    began: float
    ended: float
    last_start: float
    busy: float = 0.0
    idle: tuple[float, ...] = ()

    def bubble(self, slots: int) -> float:
        span = slots * (self.ended - self.began)
        return sum(self.idle) / span if span > 0 else 0.0


@dataclass(frozen=True)
class SlotTime:
    """Slots of a run over time. Seconds count from the first event; pauses between two starts are cut out."""

    slots: int  # Q of the bubble ratio; if the run did not log it, the most requests that ran at a time
    logged: bool  # whether the run logged ``slots``
    replicas: Array  # numbers, [R]
    requests: dict[str, Array]  # those that ran, [N], by start: ``replica`` (0 to R - 1), ``started``, ``finished``
    tools: dict[str, Array]  # times between two turns, [T]: number of the ``replica``, ``left``, ``back``
    edges: Array  # bounds of the intervals, float64[k + 1]
    reason: Array  # of idle slots in each interval, int8[k]
    windows: list[Window]  # of rollout
    shares: Array  # of all slot seconds by :data:`REASONS`, float64[7]
    stages: dict[str, Array]  # columns ``step``, ``stage``, ``started``, ``ended``
    pauses: int  # cut out
    origin: float  # time of the first event in seconds since the Unix epoch

    @property
    def ended(self) -> float:
        return float(self.edges[-1])

    @property
    def rollout_shares(self) -> Array:
        """Shares of the slot seconds of rollout windows, float64[7]. All but the first sum to the bubble ratio."""
        seconds = np.zeros(len(REASONS))
        for window in self.windows:
            seconds[BUSY] += window.busy
            seconds[1:] += window.idle
        return seconds / seconds.sum() if seconds.sum() > 0 else seconds

    @property
    def bubble(self) -> float:
        return float(self.rollout_shares[1:].sum())

    @cached_property
    def by_replica(self) -> list[Array]:
        replica = self.requests["replica"]
        order = np.argsort(replica, kind="stable")
        return np.split(order, np.searchsorted(replica[order], np.arange(1, len(self.replicas))))

    @cached_property
    def lane_slots(self) -> float:
        """Height of a lane: an equal share of the slots, or the most that a replica ran if that is clearly more."""
        share = self.slots / len(self.replicas)
        most = max(
            _running(*(self.requests[n][mine] for n in ("started", "finished")))[1].max() for mine in self.by_replica
        )
        return float(most) if most > _FULL * share else share

    def occupied(self, replica: int, edges: Array) -> Array:
        """Return the mean number of running requests of a replica between ``edges`` [k + 1]: float64[k]."""
        mine = self.by_replica[replica]
        return _mean_between(self.requests["started"][mine], self.requests["finished"][mine], edges)

    def away(self, replica: int, edges: Array) -> Array:
        """Return the mean number of samples between two turns that explain idle slots of a replica: float64[k]."""
        mine = self.tools["replica"] == self.replicas[replica]
        reason = self.reason[np.searchsorted(self.edges, (edges[:-1] + edges[1:]) / 2).clip(1, len(self.reason)) - 1]
        return np.isin(reason, _ROLLOUT) * _mean_between(self.tools["left"][mine], self.tools["back"][mine], edges)


def measure(requests: Columns, stages: Columns, slots: int | None, runs_on: bool) -> SlotTime | None:
    """Compute slot time from columns of ``events.REQUESTS`` and ``events.STAGES``; ``None`` if they have no times.

    Validation is ignored. ``slots``: Q of the bubble ratio, if known; ``runs_on``: engines continue while the actor
    trains.
    """
    ran = ~requests["validate"] & np.isfinite(requests["started_at"]) & np.isfinite(requests["finished_at"])
    rows = np.flatnonzero(ran)
    kept = np.isfinite(stages["started_at"]) & (stages["duration_s"] >= 0)  # a ready batch takes 0 s
    if not len(rows) or _GEN not in stages["stage"][kept]:
        return None
    rows = rows[np.argsort(requests["started_at"][rows], kind="stable")]
    started = requests["started_at"][rows].astype(np.float64)
    finished = np.maximum(started, requests["finished_at"][rows])
    sent = np.flatnonzero(~requests["validate"] & np.isfinite(requests["queued_at"] + requests["finished_at"]))
    before, _, left, back, _ = turns({name: requests[name][sent] for name in COLUMNS})
    stage = {name: values[kept] for name, values in stages.items()}
    began, ended = stage["started_at"].astype(np.float64), stage["started_at"] + stage["duration_s"]

    cut, pauses, origin = _pauses(np.concatenate([started, began]), np.concatenate([finished, ended]))
    started, finished, began, ended, left, back = map(cut, (started, finished, began, ended, left, back))
    columns = {"step": stage["step"], "stage": stage["stage"].astype(str), "started": began, "ended": ended}
    replicas, replica = np.unique(requests["replica"][rows], return_inverse=True)
    tools = {"replica": requests["replica"][sent[before]], "left": left, "back": back}
    ran_columns = {"replica": replica, "started": started, "finished": finished}

    times, counts = _running(started, finished)
    q = slots or int(counts.max(initial=1))
    last = max(float(finished.max()), float(ended.max(initial=0.0)))
    steps = _Steps.of(columns)
    windows = _between_batches(started, steps) if runs_on else _between_trainings(started, finished, steps)
    edges, reason = _reasons(columns, windows, steps, started, runs_on, last)
    windows, shares = _count_seconds(q, windows, edges, reason, (times, counts), _running(left, back))
    return SlotTime(
        *(q, slots is not None, replicas, ran_columns, tools, edges, reason, windows, shares, columns, pauses, origin)
    )


def _running(started: Array, finished: Array) -> tuple[Array, Array]:
    """Return the times of starts and ends, float64[2N], and the running requests from each on, int[2N]."""
    times = np.concatenate([started, finished])
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(np.repeat([1, -1], len(started))[order])


@dataclass(frozen=True)
class _Steps:
    """Times of each step: when its batch was collected, and when the engines had the weights."""

    numbers: Array
    collected: Array
    synced: Array

    @classmethod
    def of(cls, stages: Columns) -> _Steps:
        gen, sync, step = (stages["stage"] == name for name in (_GEN, _SYNC, _STEP))
        numbers, collected, synced = [], [], []
        for number in np.unique(stages["step"][gen]):
            mine = stages["step"] == number
            done = float(stages["ended"][mine & gen].max())
            ends = stages["ended"][mine & sync] if (mine & sync).any() else stages["ended"][mine & step]
            numbers.append(int(number))
            collected.append(done)
            synced.append(max(done, float(ends.max(initial=done))))
        return cls(np.array(numbers), np.array(collected), np.array(synced))


def _between_trainings(started: Array, finished: Array, steps: _Steps) -> list[Window]:
    """Return the windows of engines that stop while the actor trains. They are idle from the collection of a batch to
    the weight sync; windows are divided in the middle of that time, because clocks of nodes may differ.
    """
    phase = np.searchsorted((steps.collected + steps.synced) / 2, finished)
    numbers = np.append(steps.numbers, steps.numbers[-1] + 1)  # an unfinished step has requests but no stages
    windows = []
    for k, number in enumerate(numbers.tolist()):
        rows = phase == k
        if rows.any():
            mine = started[rows]
            windows.append(Window(number, float(mine.min()), float(finished[rows].max()), float(mine.max())))
    return windows


def _between_batches(started: Array, steps: _Steps) -> list[Window]:
    ordered = np.sort(started)
    begins = np.concatenate([ordered[:1], steps.collected[:-1]])
    windows = []
    for number, began, ended in zip(steps.numbers, begins, steps.collected, strict=True):
        if ended > began:
            at = np.searchsorted(ordered, ended, side="right")
            last_start = float(ordered[at - 1]) if at else began
            windows.append(Window(int(number), float(began), float(ended), max(float(began), last_start)))
    return windows


def _reasons(
    stages: Columns, windows: list[Window], steps: _Steps, started: Array, runs_on: bool, last: float
) -> tuple[Array, Array]:
    """Divide time into intervals of one reason each; later spans overwrite earlier ones."""
    rollout = [(window.began, window.last_start, STARVED) for window in windows]
    rollout += [(window.last_start, window.ended, TAIL) for window in windows]
    within = np.isin(stages["stage"], TRAINING_STAGES)
    training = []
    for step in np.unique(stages["step"][within]):
        mine = within & (stages["step"] == step)
        training.append((float(stages["started"][mine].min()), float(stages["ended"][mine].max()), TRAINING))
    sync = stages["stage"] == _SYNC
    syncing = [(a, b, SYNC) for a, b in zip(stages["started"][sync], stages["ended"][sync], strict=True)]
    if not runs_on:
        strips = [*training, *syncing, *rollout]
    else:
        held = []
        ordered = np.sort(started)
        for collected, synced in zip(steps.collected, steps.synced, strict=True):
            at = np.searchsorted(ordered, synced)
            held.append((max(collected, float(ordered[at - 1]) if at else collected), synced, TRAINING))
        strips = [*rollout, *held, *syncing]
    edges = np.unique([0.0, last, *(t for begin, end, _ in strips for t in (begin, end))])
    reason = np.full(len(edges) - 1, OTHER, dtype=np.int8)
    for begin, end, why in strips:
        reason[np.searchsorted(edges, begin) : np.searchsorted(edges, end)] = why
    return edges, reason


def _count_seconds(
    slots: int,
    windows: list[Window],
    edges: Array,
    reason: Array,
    requests: tuple[Array, Array],
    away: tuple[Array, Array],
) -> tuple[list[Window], Array]:
    """Return the windows with their slot seconds by reason, and the shares of all slot seconds. ``edges`` and
    ``reason`` are of :func:`_reasons`; ``requests`` and ``away``, the samples between two turns, of :func:`_running`.
    """
    bounds = [t for window in windows for t in (window.began, window.ended)]
    cuts = np.unique(np.concatenate([edges, requests[0], away[0], bounds]))
    busy = _counted(requests, cuts[:-1]).clip(0, slots)
    seconds = np.diff(cuts)
    why = reason[np.searchsorted(edges, cuts[:-1], side="right") - 1]
    tool = np.where(np.isin(why, _ROLLOUT), np.minimum(_counted(away, cuts[:-1]), slots - busy), 0)
    by_reason = np.zeros((len(REASONS), len(cuts)))
    by_reason[BUSY, 1:], by_reason[TOOL, 1:] = np.cumsum(busy * seconds), np.cumsum(tool * seconds)
    for code in range(TAIL, len(REASONS)):
        by_reason[code, 1:] = np.cumsum(np.where(why == code, (slots - busy - tool) * seconds, 0.0))
    counted = []
    for window in windows:
        begin, end = np.searchsorted(cuts, [window.began, window.ended])
        spent = by_reason[:, end] - by_reason[:, begin]
        counted.append(replace(window, busy=float(spent[BUSY]), idle=tuple(spent[1:].tolist())))
    total = by_reason[:, -1]
    return counted, total / total.sum() if total.sum() > 0 else total


def _counted(running: tuple[Array, Array], at: Array) -> Array:
    """Return the counts of :func:`_running` at times, int64[k]."""
    times, counts = running
    return np.append(counts, 0)[np.searchsorted(times, at, side="right") - 1]


def _mean_between(started: Array, finished: Array, edges: Array) -> Array:
    return np.diff(busy_until(started, finished, edges)) / np.maximum(np.diff(edges), 1e-12)


def busy_until(started: Array, finished: Array, at: Array) -> Array:
    """Return the request seconds up to each time, float64[k]: exact for bins of any width."""

    def passed(times: Array) -> Array:
        times = np.sort(times)
        known = np.searchsorted(times, at, side="right")
        sums = np.concatenate([[0.0], np.cumsum(times)])
        return known * at - sums[known]

    return passed(started) - passed(finished)


def _pauses(began: Array, ended: Array) -> tuple[Any, int, float]:
    """Return a function that cuts pauses out of times, the number of pauses, and the time of the first event."""
    order = np.argsort(began)
    began, reached = began[order], np.maximum.accumulate(ended[order])
    origin, span = float(began[0]), float(reached[-1] - began[0])
    gaps = began[1:] - reached[:-1]
    long = np.flatnonzero(gaps > max(_PAUSE_S, _PAUSE_SHARE * span))
    at, lost = reached[:-1][long], np.concatenate([[0.0], np.cumsum(gaps[long])])

    def cut(times: Array) -> Array:
        return times - origin - lost[np.searchsorted(at, times, side="left")]

    return cut, len(at), origin
