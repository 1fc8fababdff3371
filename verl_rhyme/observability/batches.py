"""Metrics of a training batch, computed by the coordinator."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.batch import Batch
from verl_rhyme.scheduling.dispatch import Dispatch
from verl_rhyme.scheduling.expectations import Expectations


class Occupancy:
    """Bubble ratio where every change of the number of running requests is reported at once, as in a simulation.
    ``slots``: Q of :func:`~verl_rhyme.observability.metrics.bubble_ratio`; ``now``: seconds, by any clock.
    """

    def __init__(self, slots: int, now: float) -> None:
        self._slots, self._now, self._running, self._busy, self._room = slots, now, 0, 0.0, 0.0

    def set_running(self, now: float, running: int) -> None:
        passed = now - self._now
        self._busy += passed * min(self._running, self._slots)
        self._room += passed * self._slots
        self._now, self._running = now, running

    def end_interval(self) -> float:
        """Return the ratio from the last call until the latest :meth:`set_running`."""
        busy, room = self._busy, self._room
        self._busy = self._room = 0.0
        return 1.0 - busy / room if room > 0 else 0.0


def forecast_metrics(expectations: Expectations) -> dict[str, float]:
    """Return ``rollout/lengths/*``: accuracy of the forecasts for groups completed since the last call."""
    measures = expectations.measures()
    failed = {names.LENGTH_ERRORS: float(expectations.errors)} if expectations.errors else {}
    return {**{names.LENGTHS + name: value for name, value in measures.items()}, **failed}


def placement_metrics(dispatch: Dispatch) -> dict[str, float]:
    """Return ``rollout/placement/*`` since the last call; empty if the coordinator does not place samples."""
    if dispatch.placement is None:
        return {}
    moved, dispatch.moved = dispatch.moved, 0
    errors = dispatch.placement.errors
    return {names.PLACEMENT_MOVED: float(moved), **({names.PLACEMENT_ERRORS: float(errors)} if errors else {})}


def batch_metrics(batch: Batch, slots: int, taken: float | None = None) -> dict[str, float]:
    """Return ``training/sorted/*``, ``training/staleness/*`` and the bubble ratio of a batch (Q: ``slots``).

    ``taken`` is the time of collection in seconds since the Unix epoch, where rollout continues while the actor trains:
    there the finished requests alone give no bubble ratio, the event log does
    (:mod:`~verl_rhyme.observability.slot_time`).
    """
    collected, counts = batch.collected, batch.counts
    metrics: dict[str, Any] = {
        names.SORTED_DISCARDED: counts.wasted_tokens,
        names.SORTED_INTERRUPTED: counts.interrupted,
        names.SORTED_STALE: counts.stale,
        names.SORTED_ABANDONED: counts.abandoned,
        names.SORTED_FAILED: counts.failed,
        names.SORTED_UNREWARDED: counts.unrewarded,
        names.SORTED_LOADED: counts.loaded,
        names.SORTED_DROPPED: counts.dropped,
        names.SORTED_WAITING_MEAN: np.mean(collected.waited),
        names.SORTED_WAITING_MAX: max(collected.waited),
        names.SORTED_TRAINED: sum(collected.lengths),
        names.SORTED_LEFT: batch.left,
        **names.staleness_metrics(
            collected.group_staleness,
            [batch.version - record["policy_version_end"] for record in batch.trained],
            [record["response_tokens"] for record in batch.trained],
        ),
    }
    if taken is None and batch.ran:
        started, finished = ([record[name] for record in batch.ran] for name in ("started_at", "finished_at"))
        metrics[names.BUBBLE_RATIO] = names.bubble_ratio(started, finished, slots)
    if taken is not None and batch.trained:
        metrics[names.STREAM_AHEAD] = max(0.0, taken - max(record["finished_at"] for record in batch.trained))
    return {name: float(value) for name, value in metrics.items()}
