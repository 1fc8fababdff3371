"""Metrics of an update batch, from what the coordinator knows of it."""

from __future__ import annotations

import numpy as np

from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.remembered import Batch


def batch_metrics(batch: Batch, slots: int) -> dict[str, float]:
    """``training/sorted/*`` and the bubble ratio (:func:`~verl_rhyme.observability.metrics.bubble_ratio`).

    Args:
        batch: As it was taken.
        slots: Q of the bubble ratio.
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
    if batch.ran:
        started, finished = (np.array([r[name] for r in batch.ran]) for name in ("started_at", "finished_at"))
        metrics[names.BUBBLE_RATIO] = names.bubble_ratio(started, np.maximum(started, finished), slots)
    return {name: float(value) for name, value in metrics.items()}
