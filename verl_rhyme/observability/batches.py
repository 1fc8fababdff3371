"""Metrics of a training batch, computed by the coordinator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.batch import Batch, Record
from verl_rhyme.scheduling.dispatch import Dispatch
from verl_rhyme.scheduling.expectations import Expectations

#: Minimum response length of a request that measures the speed of its replica.
_ENOUGH_TOKENS = 8


class SlotAccount:
    """Bubble ratio from one batch collection to the next, where rollout continues while the actor trains.

    The event log gives the same ratio later (:mod:`~verl_rhyme.observability.slot_time`). Finished requests have
    recorded their times. For running requests the account assumes three things. A request reaches its engine as fast as
    the fastest finished one. It occupies a free slot, because no engine leaves a slot empty while a request waits. It
    pauses while the engines receive weights.

    Times are in seconds since the Unix epoch, as in the engines.

    Args:
        slots: Q of :func:`~verl_rhyme.observability.metrics.bubble_ratio`; if it changes between two collections, the
            latest value counts.
        since: Start of the first interval; ``None``: the first request's start.
    """

    def __init__(self, slots: int, since: float | None = None) -> None:
        self.slots, self._since = slots, since
        self._sent_at: dict[str, float] = {}  # by name of the attempt
        self._finished: list[tuple[float, float, float]] = []  # queued, started, finished
        self._syncs: list[tuple[float, float]] = []
        self._sync_began: float | None = None

    def add_sent(self, names: Iterable[str], now: float) -> None:
        """Add attempts that were sent to the engines."""
        self._sent_at.update(dict.fromkeys(names, now))

    def add_finished(self, records: Iterable[Record]) -> None:
        self._finished += [(r.get("queued_at", np.nan), r["started_at"], r["finished_at"]) for r in records]

    def begin_sync(self, now: float) -> None:
        """Record that a weight update of the engines begins."""
        self._sync_began = now if self._sync_began is None else self._sync_began

    def end_sync(self, now: float) -> None:
        """Record that the engines have the new weights."""
        if self._sync_began is not None:
            self._syncs.append((self._sync_began, now))
        self._sync_began = None

    def end_interval(self, now: float, running: Collection[str]) -> float:
        """Return the ratio from the last call until now; ``running`` names the unfinished attempts."""
        queued, started, finished = np.array(self._finished, dtype=np.float64).reshape(-1, 3).T
        known = np.isfinite(started) & np.isfinite(finished)
        queued, started, finished = queued[known], started[known], np.maximum(started, finished)[known]
        since = float(started.min(initial=now)) if self._since is None else self._since
        waits = (started - queued)[np.isfinite(queued)].clip(min=0.0)
        wait = float(waits.min()) if len(waits) else 0.0
        unknown = np.sort([self._sent_at.get(name, since - wait) + wait for name in running])
        open_sync = [] if self._sync_began is None else [(self._sync_began, now)]
        syncs = np.array([*self._syncs, *open_sync]).reshape(-1, 2)

        cuts = np.unique(np.concatenate([[since, now], started, finished, unknown, syncs.ravel()]).clip(since, now))
        at = cuts[:-1]
        busy, waiting = (_below(starts, at) for starts in (started, unknown))
        busy -= _below(finished, at)
        waiting[_below(syncs[:, 0], at) > _below(syncs[:, 1], at)] = 0
        idle = float(np.dot((self.slots - busy - waiting).clip(0, self.slots), np.diff(cuts)))
        self._since, self._finished, self._syncs = now, [], []
        self._sent_at = {name: when for name in running if (when := self._sent_at.get(name)) is not None}
        return idle / (self.slots * (now - since)) if now > since else 0.0


class Occupancy:
    """Bubble ratio where every change of the number of running requests is reported at once, as in a simulation.

    Args:
        slots: Q of :func:`~verl_rhyme.observability.metrics.bubble_ratio`.
        now: Seconds, by any clock.
    """

    def __init__(self, slots: int, now: float) -> None:
        self._slots, self._now, self._running, self._busy, self._room = slots, now, 0, 0.0, 0.0

    def set_running(self, now: float, running: int) -> None:
        """Record the number of running requests from ``now`` on."""
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


def batch_metrics(
    batch: Batch, slots: int, bubble: float | None = None, taken: float | None = None
) -> dict[str, float]:
    """Return ``training/sorted/*``, ``training/staleness/*`` and the bubble ratio
    (:func:`~verl_rhyme.observability.metrics.bubble_ratio`).

    Args:
        batch: Collected batch.
        slots: Q of the bubble ratio.
        bubble: Bubble ratio, where finished requests alone do not give it (:class:`SlotAccount`).
        taken: Time of collection in seconds since the Unix epoch, where rollout continues while the actor trains.
    """
    collected, counts = batch.collected, batch.counts
    metrics: dict[str, Any] = {
        names.SORTED_DISCARDED: counts.wasted_tokens,
        names.SORTED_INTERRUPTED: counts.interrupted,
        names.SORTED_STALE: counts.stale,
        names.SORTED_ABANDONED: counts.abandoned,
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
    if bubble is not None:
        metrics[names.BUBBLE_RATIO] = bubble
    elif batch.ran:
        started, finished = ([record[name] for record in batch.ran] for name in ("started_at", "finished_at"))
        metrics[names.BUBBLE_RATIO] = names.bubble_ratio(started, finished, slots)
    if taken is not None and batch.trained:
        metrics[names.STREAM_AHEAD] = max(0.0, taken - max(record["finished_at"] for record in batch.trained))
    return {name: float(value) for name, value in metrics.items()}


def replica_paces(records: Iterable[Record]) -> dict[int, float]:
    """Return seconds per token of a request by replica: the median over its finished requests."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for record in records:
        span, tokens = record["finished_at"] - record["first_token_at"], record["response_tokens"] - 1
        if tokens >= _ENOUGH_TOKENS and np.isfinite(span) and span > 0:
            seconds[record["replica"]].append(span / tokens)
    return {replica: float(np.median(paces)) for replica, paces in seconds.items()}


def _below(times: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Count the ``times`` up to each of ``at``: int64[len(at)]."""
    return np.searchsorted(np.sort(times), at, side="right")
