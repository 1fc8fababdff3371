"""Metrics of an update batch, from what the coordinator knows of it."""

from __future__ import annotations

import numpy as np

from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.scheduling.remembered import Batch


class Occupancy:
    """The bubble ratio of a rollout that goes on while the actor trains: there is no moment at which all that ran has
    ended and told when it began. So the samples that are started and not ended are counted, as they change.

    Args:
        slots: Q of :func:`~verl_rhyme.observability.metrics.bubble_ratio`.
        now: Seconds, by any clock.
    """

    def __init__(self, slots: int, now: float) -> None:
        self._slots, self._since, self._now, self._running, self._busy = slots, now, now, 0, 0.0

    def at(self, now: float, running: int) -> None:
        """So many samples run from now on."""
        self._busy += (now - self._now) * min(self._running, self._slots)
        self._now, self._running = now, running

    def take(self) -> float:
        """The ratio from the last call until the latest :meth:`at`."""
        span, busy = self._now - self._since, self._busy
        self._since, self._busy = self._now, 0.0
        return 1.0 - busy / (self._slots * span) if span > 0 else 0.0


def forecast_metrics(expectations: Expectations) -> dict[str, float]:
    """``rollout/lengths/*``, of the groups that were completed since the last call: what forecasts were worth."""
    measures = expectations.measures()
    failed = {names.LENGTH_ERRORS: float(expectations.errors)} if expectations.errors else {}
    return {**{names.LENGTHS + name: value for name, value in measures.items()}, **failed}


def batch_metrics(batch: Batch, slots: int, bubble: float | None = None) -> dict[str, float]:
    """``training/sorted/*`` and the bubble ratio (:func:`~verl_rhyme.observability.metrics.bubble_ratio`).

    Args:
        batch: As it was taken.
        slots: Q of the bubble ratio.
        bubble: Where it cannot be told from what ended (:class:`Occupancy`).
    """
    harvest, counts = batch.harvest, batch.counts
    ages = [batch.version - record["policy_version_end"] for record in batch.trained]
    tokens = [record["response_tokens"] for record in batch.trained]
    metrics = {
        names.SORTED_DISCARDED: counts.wasted_tokens,
        names.SORTED_INTERRUPTED: counts.interrupted,
        names.SORTED_STALE: counts.stale,
        names.SORTED_ABANDONED: counts.abandoned,
        names.SORTED_LOADED: counts.loaded,
        names.SORTED_DROPPED: counts.dropped,
        names.SORTED_WAITING_MEAN: np.mean(harvest.waited),
        names.SORTED_WAITING_MAX: max(harvest.waited),
        names.SORTED_TOKEN_STALENESS_MEAN: np.average(ages, weights=tokens) if sum(tokens) else 0.0,
        names.SORTED_TOKEN_STALENESS_MAX: max(ages, default=0),
        names.SORTED_TRAINED: sum(harvest.lengths),
        names.SORTED_LEFT: batch.left,
    }
    if bubble is not None:
        metrics[names.BUBBLE_RATIO] = bubble
    elif batch.ran:
        started, finished = (np.array([r[name] for r in batch.ran]) for name in ("started_at", "finished_at"))
        metrics[names.BUBBLE_RATIO] = names.bubble_ratio(started, np.maximum(started, finished), slots)
    return {name: float(value) for name, value in metrics.items()}
