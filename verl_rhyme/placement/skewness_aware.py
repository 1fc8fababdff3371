"""Skewness-aware dispatch: long responses on replicas of their own, with few beside them.

StreamRL (arXiv:2504.15930), section 5, Algorithm 2: the prompts of a step are ranked by the length that is expected of
them, and the longest have so many replicas of their own that both pools' seconds are least. As published these are two
pools, made when the step begins, and their seconds are *summed*. As they run at once, a step takes as long as the
slower one: ``objective="max"``. With it there may be more pools, cut where that is best, and what a pool takes is
reckoned until its last sample is done (:mod:`~verl_rhyme.placement.pools`).

**Bound late** (``late``). The samples of a pool get its free slots, the longest first. What finds none is not started
and bound to no replica: when some have ended, and it is known how far the rest is, all that is left is cut into pools
anew, single samples by their own distributions of lengths, not prompts. Slots that a pool leaves free serve the
shortest that wait for other pools, as those are soonest gone, but only as many as would wait even if no slot stood
idle: where there are slots for all, one is left free so that steps beside a long response are short.

Within a replica the longest go first (:mod:`~verl_rhyme.scheduling.admission`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from verl_rhyme.lengths.outlook import certain, edges
from verl_rhyme.placement.fleet import REQUESTS, TOKENS, Fleet
from verl_rhyme.placement.policy import (
    Ahead,
    Load,
    Move,
    PlacementPolicy,
    Progress,
    Request,
    expected_tokens,
    roughly,
)
from verl_rhyme.placement.pools import Replicas, Samples, several, two
from verl_rhyme.planning.cost import Floats

#: Shares of what runs that have ended when it is looked how far the rest is, and when plans are made without a look.
_LOOK, _BLIND = 0.02, 0.25
#: More are not looked at at a time: forecasts for all of them would hold others up.
_WATCHED = 16384
#: Where nobody knows a cache's room.
_ROOMY = 1e15
#: Rooms between two of so many powers of 2 for each doubling are one kind's: engines report each its own.
_ROOMS = 16


@dataclass(eq=False)
class _Place:
    """A pool's replicas, with what each has done of it when the pool is done."""

    name: str
    tokens: float  # the least that are expected of its samples
    share: dict[str, float]
    columns: tuple[int, np.ndarray, Floats] = field(default=(-1, np.zeros(0, np.intp), np.zeros(0)))

    def within(self, fleet: Fleet) -> tuple[np.ndarray, Floats]:
        """Columns and shares of those that serve yet."""
        if self.columns[0] != fleet.version:
            left = [name for name in self.share if name in fleet]
            columns = np.array([fleet.index[name] for name in left], np.intp)
            self.columns = fleet.version, columns, np.array([self.share[name] for name in left])
        return self.columns[1:]


class _Left(NamedTuple):
    """What a sample has to go."""

    tokens: float | None
    begin: int
    ahead: Ahead | None


class _Run(NamedTuple):
    replica: str
    place: _Place | None
    begin: int  # tokens that it came with
    left: _Left


class SkewnessAware(PlacementPolicy):
    """See the module. A response of unknown length counts as the mean of the others.

    Args:
        fleet: Where the loads stand.
        objective: What is to be least of the pools' seconds: ``sum``, as published, or ``max``.
        pools: At most; with more than two, which need ``max``, the cuts are chosen as well.
        tail: Of two pools, the share of prompts (``late``: of samples) in the first.
        late: Nothing is bound that finds no slot.

    Raises:
        ValueError: Options that cannot be.
    """

    def __init__(
        self, fleet: Fleet, objective: str = "sum", pools: int = 2, tail: float = 0.2, late: bool = False
    ) -> None:
        if objective not in ("sum", "max"):
            raise ValueError(f"skewness_aware: objective={objective!r} must be sum or max")
        if pools < 2 or not 0 < tail < 1:
            raise ValueError(f"skewness_aware: pools={pools} must be at least 2, tail={tail} above 0 and below 1")
        if pools > 2 and objective == "sum":
            raise ValueError(f"skewness_aware: objective=sum with pools={pools}: it must be max, or pools=2")
        self._fleet, self._objective, self._most, self._tail, self._late = fleet, objective, pools, tail, late
        self._pool: dict[str, _Place] = {}  # by prompt
        self._coming: dict[str, tuple[str | None, _Place | None]] = {}
        self._runs: dict[str, _Run] = {}  # this and what follows: bound late
        self._waiting = self._looked = False
        self._ended = 0  # since the last plan

    def plan(self, step: int, loads: Sequence[Load]) -> None:
        if self._late or len(loads) < 2:
            return
        tokens = expected_tokens(loads)
        order = np.argsort(-tokens, kind="stable")
        count = np.array([load.samples for load in loads], np.float64)[order]
        begin = np.array([load.prompt_tokens for load in loads], np.float64)[order]
        for place, members in self._places(f" in step {step}", Samples(tokens[order], count, begin)):
            self._pool.update((loads[i].key, place) for i in order[members].tolist())

    def left(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._pool.pop(key, None)

    def choose(self, request: Request) -> str | None:
        fleet = self._fleet
        replica, place = self._coming.get(request.id, ("", self._pool.get(request.key)))
        if replica is None or replica in fleet:
            return replica
        at, share = place.within(fleet) if place is not None else (np.zeros(0, np.intp), np.zeros(0))
        if not len(at):
            return fleet.names[fleet.least_tokens()]
        load = (fleet.running[TOKENS, at] + fleet.running[REQUESTS, at] * 2.0**-20) / share
        return fleet.names[int(at[load.argmin()])]

    def reason(self, request: Request, replica: str) -> str:
        run = self._runs.get(request.id)
        place = self._pool.get(request.key) if run is None else run.place
        if place is None:
            return "in no plan: where the fewest tokens were"
        count = len(place.within(self._fleet)[0])
        if not count:
            return "its pool's replicas are gone: where the fewest tokens were"
        told = f"{place.name}, {roughly(place.tokens)} tokens or more expected"
        if self._late and replica not in place.share:
            return f"{told}: in a slot that another pool left free"
        return f"{told}: {count} of {len(self._fleet)} replicas"

    # ---- bound late ----

    def coming(self, requests: Sequence[Request]) -> None:
        if not self._late or not requests:
            return
        fleet, runs = self._fleet, list(self._runs.values())
        self._coming.clear()
        self._waiting = self._looked = False
        self._ended = 0
        own = [_Left(request.response_tokens, request.prompt_tokens, request.ahead) for request in requests]
        order, samples = _ranked([*own, *(run.left for run in runs)])
        tokens = dict(zip(order.tolist(), samples.tokens.tolist(), strict=True))
        load = dict.fromkeys(fleet.names, 0.0)
        for i, run in enumerate(runs, len(own)):
            load[run.replica] += tokens[i]
        slots = zip(fleet.names, fleet.costs, strict=True)
        free = {name: max(0, cost.slots - fleet.requests(name)) for name, cost in slots}
        places: Sequence[tuple[_Place | None, slice]] = self._places("", samples)
        over: list[tuple[str, _Place | None]] = []
        for place, members in places or [(None, slice(None))]:
            share = dict.fromkeys(fleet.names, 1.0) if place is None else place.share
            heap = [(load[name] / each, i, name) for i, (name, each) in enumerate(share.items()) if free[name] > 0]
            heapq.heapify(heap)
            for i in order[members].tolist():
                if i >= len(own):
                    continue
                if not heap:
                    over.append((requests[i].id, place))
                    continue
                _, at, name = heap[0]
                self._coming[requests[i].id] = name, place
                load[name] += tokens[i]
                free[name] -= 1
                if free[name] > 0:
                    heapq.heapreplace(heap, (load[name] / share[name], at, name))
                else:
                    heapq.heappop(heap)
        self._spill(over, free)

    def _spill(self, over: Sequence[tuple[str, _Place | None]], free: Mapping[str, int]) -> None:
        """Of what found no slot in its pool, from the longest on, the last go to others': the shortest where most slots
        are free, for these are where the longest run."""
        idle = sum(free.values())
        lent = max(0, min(idle, len(over) - idle))
        heap = [(-count, i, name) for i, (name, count) in enumerate(free.items()) if count > 0]
        heapq.heapify(heap)
        stay = len(over) - lent
        for name, place in reversed(over[stay:]):
            count, at, replica = heap[0]
            self._coming[name] = replica, place
            if count < -1:
                heapq.heapreplace(heap, (count + 1, at, replica))
            else:
                heapq.heappop(heap)
        self._coming.update((name, (None, place)) for name, place in over[:stay])
        self._waiting = stay > 0

    def started(self, request: Request, replica: str) -> None:
        if self._late:
            _, place = self._coming.pop(request.id, ("", None))
            left = _Left(request.response_tokens, request.prompt_tokens, request.ahead)
            self._runs[request.id] = _Run(replica, place, request.prompt_tokens, left)

    def released(self, request: Request, replica: str, tokens: int | None) -> None:
        if self._runs.pop(request.id, None) is not None:
            self._ended += 1

    def due(self) -> bool:
        return self._ended > 0 and (self._looked or self._ended >= _BLIND * len(self._runs))

    def watched(self) -> Sequence[str]:
        if not self._waiting or self._ended < max(1, _LOOK * len(self._runs)):
            return ()
        turn = list(islice(self._runs, _WATCHED))
        for name in turn:  # of more than that each has its turn
            self._runs[name] = self._runs.pop(name)
        return turn

    def moves(self, progress: Mapping[str, Progress]) -> Iterable[Move]:
        for name, now in progress.items():
            if (run := self._runs.get(name)) is not None:
                self._runs[name] = run._replace(left=_Left(now.left, run.begin + now.made, now.ahead))
        self._looked = True
        return ()

    # ---- within ----

    def _places(self, of: str, samples: Samples) -> list[tuple[_Place, slice]]:
        """Pools, each with its samples; none where there is nothing to choose."""
        fleet = self._fleet
        if len(fleet) < 2 or len(samples.tokens) < 2:
            return []
        rooms = np.exp2(np.floor(np.log2(np.minimum(fleet.capacity, _ROOMY)) * _ROOMS) / _ROOMS).tolist()
        kinds = [
            (cost.step.base, cost.step.row, cost.step.cached, float(cost.slots), room)
            for cost, room in zip(fleet.costs, rooms, strict=True)
        ]
        # a long response is soonest done where a step of few rows takes least
        ranked = sorted(set(kinds), key=lambda kind: (kind[0] + kind[1], kind))
        number = {kind: k for k, kind in enumerate(ranked)}
        names = [fleet.names[i] for i in sorted(range(len(kinds)), key=lambda i: number[kinds[i]])]
        ends = np.cumsum(np.bincount([number[kind] for kind in kinds]))
        replicas = Replicas(np.array(ranked), ends)
        if self._most == 2:
            pools = two(samples, replicas, self._tail, self._objective)
        else:
            pools = several(samples, replicas, self._most)
        found = []
        for rank, pool in enumerate(pools, 1):
            kind = np.searchsorted(ends, np.arange(pool.first, pool.last), side="right")
            share = dict(zip(names[pool.first : pool.last], pool.share[kind].tolist(), strict=True))
            least = float(samples.tokens[pool.end - 1])
            place = _Place(f"pool {rank} of {len(pools)}{of}", least, share)
            found.append((place, slice(pool.begin, pool.end)))
        return found


def _ranked(left: Sequence[_Left]) -> tuple[np.ndarray, Samples]:
    """int64[N], the order of falling length, and the samples in it."""
    known = [each.tokens for each in left if each.tokens is not None]
    mean = float(np.mean(known)) if known else 1.0
    tokens = np.array([mean if each.tokens is None else max(1.0, each.tokens) for each in left])
    begin = np.array([each.begin for each in left], np.float64)
    order = np.argsort(-tokens, kind="stable")
    samples = Samples(tokens[order], np.ones(len(left)), begin[order])
    if (limit := next((each.ahead.limit for each in left if each.ahead is not None), None)) is None:
        return order, samples
    beyond = certain(np.ceil(tokens).astype(np.int64), 0, limit).beyond.astype(np.float64)
    told = [i for i, each in enumerate(left) if each.ahead is not None and each.ahead.limit == limit]
    beyond[told] = [left[i].ahead.beyond for i in told]  # type: ignore[union-attr]
    return order, samples._replace(beyond=beyond[order], width=np.diff(edges(limit)))
