"""Metrics of an update batch, from what the coordinator knows of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from verl_rhyme.observability import metrics as names
from verl_rhyme.scheduling.dispatch import Dispatch
from verl_rhyme.scheduling.expectations import Expectations
from verl_rhyme.scheduling.remembered import Batch, Record

#: Of a request that tells how fast its replica is.
_ENOUGH_TOKENS = 8


class SlotAccount:
    """The bubble ratio from harvest to harvest of a rollout that goes on while the actor trains, as the event log tells
    it later (:mod:`~verl_rhyme.observability.slot_time`).

    What ended tells when it ran. What still runs at a harvest has told nothing yet: it is taken to have come to an
    engine as fast as the fastest of those that ended, to have had the slots that were left, for no engine lets one
    stand empty while something waits, and to have stood still while the engines got weights.

    Times are seconds since the Unix epoch, as the engines' are.

    Args:
        slots: Q of :func:`~verl_rhyme.observability.metrics.bubble_ratio`; where it changes between two harvests, the
            latest counts.
        since: From when on; ``None``: the first request's start.
    """

    def __init__(self, slots: int, since: float | None = None) -> None:
        self.slots, self._since = slots, since
        self._handed: dict[str, float] = {}  # when attempts were
        self._ran: list[tuple[float, float, float]] = []  # queued, started, finished
        self._held: list[tuple[float, float]] = []
        self._holding: float | None = None

    def handed(self, names: Iterable[str], now: float) -> None:
        """These attempts are on their way to the engines."""
        self._handed.update(dict.fromkeys(names, now))

    def ran(self, records: Iterable[Record]) -> None:
        """These requests ended."""
        self._ran += [(r.get("queued_at", np.nan), r["started_at"], r["finished_at"]) for r in records]

    def hold(self, now: float) -> None:
        """The engines are about to get weights."""
        self._holding = now if self._holding is None else self._holding

    def go(self, now: float) -> None:
        """They have them."""
        if self._holding is not None:
            self._held.append((self._holding, now))
        self._holding = None

    def take(self, now: float, running: Collection[str]) -> float:
        """The ratio from the last call until now, where these attempts have not ended."""
        queued, started, finished = np.array(self._ran, dtype=np.float64).reshape(-1, 3).T
        known = np.isfinite(started) & np.isfinite(finished)
        queued, started, finished = queued[known], started[known], np.maximum(started, finished)[known]
        since = float(started.min(initial=now)) if self._since is None else self._since
        waits = (started - queued)[np.isfinite(queued)].clip(min=0.0)
        wait = float(waits.min()) if len(waits) else 0.0
        unknown = np.sort([self._handed.get(name, since - wait) + wait for name in running])
        held = np.array([*self._held, *([] if self._holding is None else [(self._holding, now)])]).reshape(-1, 2)

        cuts = np.unique(np.concatenate([[since, now], started, finished, unknown, held.ravel()]).clip(since, now))
        at = cuts[:-1]
        busy, waiting = (_below(starts, at) for starts in (started, unknown))
        busy -= _below(finished, at)
        waiting[_below(held[:, 0], at) > _below(held[:, 1], at)] = 0
        idle = float(np.dot((self.slots - busy - waiting).clip(0, self.slots), np.diff(cuts)))
        self._since, self._ran, self._held = now, [], []
        self._handed = {name: when for name in running if (when := self._handed.get(name)) is not None}
        return idle / (self.slots * (now - since)) if now > since else 0.0


class Occupancy:
    """The bubble ratio where each change in what runs is told at once, as in a simulation.

    Args:
        slots: Q of :func:`~verl_rhyme.observability.metrics.bubble_ratio`.
        now: Seconds, by any clock.
    """

    def __init__(self, slots: int, now: float) -> None:
        self._slots, self._now, self._running, self._busy, self._room = slots, now, 0, 0.0, 0.0

    def at(self, now: float, running: int) -> None:
        """So many requests run in slots from now on."""
        passed = now - self._now
        self._busy += passed * min(self._running, self._slots)
        self._room += passed * self._slots
        self._now, self._running = now, running

    def take(self) -> float:
        """The ratio from the last call until the latest :meth:`at`."""
        busy, room = self._busy, self._room
        self._busy = self._room = 0.0
        return 1.0 - busy / room if room > 0 else 0.0


def forecast_metrics(expectations: Expectations) -> dict[str, float]:
    """``rollout/lengths/*``, of the groups that were completed since the last call: what forecasts were worth."""
    measures = expectations.measures()
    failed = {names.LENGTH_ERRORS: float(expectations.errors)} if expectations.errors else {}
    return {**{names.LENGTHS + name: value for name, value in measures.items()}, **failed}


def placement_metrics(dispatch: Dispatch) -> dict[str, float]:
    """``rollout/placement/*`` since the last call, where the coordinator places samples."""
    if dispatch.placement is None:
        return {}
    moved, dispatch.moved = dispatch.moved, 0
    errors = dispatch.placement.errors
    return {names.PLACEMENT_MOVED: float(moved), **({names.PLACEMENT_ERRORS: float(errors)} if errors else {})}


def batch_metrics(
    batch: Batch, slots: int, bubble: float | None = None, taken: float | None = None
) -> dict[str, float]:
    """``training/sorted/*``, ``training/staleness/*`` and the bubble ratio
    (:func:`~verl_rhyme.observability.metrics.bubble_ratio`).

    Args:
        batch: As it was taken.
        slots: Q of the bubble ratio.
        bubble: Where it cannot be told from what ended (:class:`SlotAccount`).
        taken: When it was, where rollout goes on while the actor trains: seconds since the Unix epoch.
    """
    harvest, counts = batch.harvest, batch.counts
    metrics: dict[str, Any] = {
        names.SORTED_DISCARDED: counts.wasted_tokens,
        names.SORTED_INTERRUPTED: counts.interrupted,
        names.SORTED_STALE: counts.stale,
        names.SORTED_ABANDONED: counts.abandoned,
        names.SORTED_LOADED: counts.loaded,
        names.SORTED_DROPPED: counts.dropped,
        names.SORTED_WAITING_MEAN: np.mean(harvest.waited),
        names.SORTED_WAITING_MAX: max(harvest.waited),
        names.SORTED_TRAINED: sum(harvest.lengths),
        names.SORTED_LEFT: batch.left,
        **names.staleness_metrics(
            harvest.group_staleness,
            [batch.version - record["policy_version_end"] for record in batch.trained],
            [record["response_tokens"] for record in batch.trained],
        ),
    }
    if bubble is not None:
        metrics[names.BUBBLE_RATIO] = bubble
    elif batch.ran:
        started, finished = (np.array([r[name] for r in batch.ran]) for name in ("started_at", "finished_at"))
        metrics[names.BUBBLE_RATIO] = names.bubble_ratio(started, np.maximum(started, finished), slots)
    if taken is not None and batch.trained:
        metrics[names.STREAM_AHEAD] = max(0.0, taken - max(record["finished_at"] for record in batch.trained))
    return {name: float(value) for name, value in metrics.items()}


def replica_paces(records: Iterable[Record]) -> dict[int, float]:
    """Seconds of a token of a request by the replica's rank: the median of its requests that ended."""
    seconds: dict[int, list[float]] = defaultdict(list)
    for record in records:
        span, tokens = record["finished_at"] - record["first_token_at"], record["response_tokens"] - 1
        if tokens >= _ENOUGH_TOKENS and np.isfinite(span) and span > 0:
            seconds[record["replica"]].append(span / tokens)
    return {replica: float(np.median(found)) for replica, found in seconds.items()}


def _below(times: np.ndarray, at: np.ndarray) -> np.ndarray:
    """int64[len(at)]: how many of some times have come."""
    return np.searchsorted(np.sort(times), at, side="right")
