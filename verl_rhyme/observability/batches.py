"""Metrics of a training batch, computed by the coordinator."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.batch import Batch
from verl_rhyme.scheduling.dispatch import Dispatch
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.scheduling.rules import Rules


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


def tool_metrics(rules: Rules, away: float) -> dict[str, float]:
    """Return advice if samples are outside the engines for a share ``away`` of their lives."""
    return {names.SLOW_TOOLS: 1.0} if rules.wants_slack(away) else {}


def batch_metrics(batch: Batch, slots: int, taken: float | None = None) -> dict[str, float]:
    """Return the metrics of a batch's samples and prompts, of their staleness, and its bubble ratio (Q: ``slots``).

    ``taken`` is the time of collection in seconds since the Unix epoch, where rollout continues while the actor trains:
    there the finished requests alone give no bubble ratio, the event log does
    (:mod:`~verl_rhyme.observability.slot_time`).
    """
    collected, counts = batch.collected, batch.counts
    metrics: dict[str, Any] = {
        names.DISCARDED_TOKENS: counts.wasted_tokens,
        names.INTERRUPTED: counts.interrupted,
        names.STALE: counts.stale,
        names.ABANDONED: counts.abandoned,
        names.FAILED_ATTEMPTS: counts.failed,
        names.UNREWARDED: counts.unrewarded,
        names.LOADED_PROMPTS: counts.loaded,
        names.DROPPED_PROMPTS: counts.dropped,
        names.WAITING_MEAN: np.mean(collected.waited),
        names.WAITING_MAX: max(collected.waited),
        names.FINISHED_LEFT: batch.left,
        **names.staleness_metrics(
            collected.group_staleness,
            [batch.version - record["policy_version_end"] for record in batch.trained],
            [record["response_tokens"] for record in batch.trained],
        ),
    }
    if taken is None and batch.ran:
        started, finished = zip(*batch.ran, strict=True)
        metrics[names.BUBBLE_RATIO] = names.bubble_ratio(started, finished, slots)
    if taken is not None and batch.trained:
        metrics[names.AHEAD_S] = max(0.0, taken - max(record["finished_at"] for record in batch.trained))
    return {name: float(value) for name, value in metrics.items()}
