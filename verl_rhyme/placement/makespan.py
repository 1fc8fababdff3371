"""The least makespan, by what steps cost and how long each response may be: bound late, and moved where that pays.

With steps of ``base + row R + cached C`` seconds (:mod:`verl_rhyme.planning.cost`) a replica is done after
``base S + row N + cached A``: N are all tokens to come, A those in the caches over the steps to come, and S the steps
until its longest response is done, or more where slots or cache do not hold all at a time. How long responses will be
is not known, but the distribution of each is, given what it has; so N and A are expectations, and S is the expected
maximum, from the product of all distributions: it is what a crowd of short ones may hold that decides, not its mean.

**Planned.** What comes together is placed in two ways: one after another where all is done first, in the order of
falling length (as :mod:`~verl_rhyme.scheduling.admission` starts them; Graham's LPT, SIAM J. Appl. Math. 1969, on
machines that slow down as they fill up); and replica by replica, the longest first, each for so many seconds as just
suffice, so that long ones are among few of their like and all others elsewhere. The latter is better where lengths are
known well, and a gamble where they are not. So lengths are drawn from the distributions, and the plan that is done
first, on average, is taken. Siblings have one forecast and stay together as far as that goes.

**In pairs.** Where siblings help each other's drafts (``sibling_gain``) a third plan is the first with two and two of
them together: one sibling is what makes the difference here, and pairs are spread nearly as well as single ones. What
being beside a sibling saves in steps counts when plans are judged, and when something is to move.

**Bound late.** What finds no slot, or no room in the cache at its expected peak, on the replica that it is planned for,
is not started, and planned anew with all others that wait when some have ended and it is known how far the rest is.

**Moved.** From the replica that is done last a request goes where both are done soonest, with the prefill of its tokens
added there, as long as that saves more than a share of the time and than the prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from verl_rhyme.lengths.outlook import CELLS, certain, edges
from verl_rhyme.placement.fleet import REQUESTS, Fleet
from verl_rhyme.placement.packing import admit, judge, pack, spread
from verl_rhyme.placement.policy import Move, PlacementPolicy, Progress, Request, roughly
from verl_rhyme.placement.siblings import Pairs, Together, prompt_of
from verl_rhyme.planning.cost import Floats

#: Tokens a response can have, as long as nobody said.
_LIMIT = 1 << 15
#: The least chance that a response ends before a cell: logarithms stay finite.
_LEAST = 1e-6
#: Of the interval in which the seconds of a plan lie.
_HALVINGS = 14
#: Of lengths, to judge plans.
_DRAWS = 8
#: Replicas that are done first, to which something may move.
_TARGETS = 4
#: Looks are taken when such a share of what runs has ended since the last one: where something waits, and else.
_SOON, _LATER = 0.02, 0.2
#: Share of what runs that has ended when what waits is planned anew without a look.
_MANY = 0.25
#: More are not looked at at a time: forecasts for all of them would hold others up.
_WATCHED = 16384
#: Where nobody knows a cache's room.
_ROOMY = 1e15
#: What plans are, as reasons.
_PLANS = {
    "": "in no plan, where all was done first",
    "spread": "spread, where all is done first",
    "pairs": "spread two and two, beside a sibling",
    "packed": "packed with its like, the longest on few replicas",
    "moved": "moved, where all was done first",
}


class _Run(NamedTuple):
    """Where a request runs, and what it adds there: rows of ``_Known``."""

    replica: str
    request: Request
    rows: Floats
    sums: Floats
    plan: str = ""  # that it came from, of _PLANS


class _Known(NamedTuple):
    """Of B requests.

    Attributes:
        beyond: float64[B, CELLS], as in an outlook.
        had: float64[B], tokens that they begin with.
        rows: float64[B, 2, CELLS], log chance that each ends before a cell, and its tokens in the cache there.
        sums: float64[B, 3], one, tokens to come, tokens in the cache over the steps to come.
    """

    beyond: Floats
    had: Floats
    rows: Floats
    sums: Floats


class Makespan(PlacementPolicy):
    """See the module. A request of unknown length counts as the mean of those that ended.

    Args:
        fleet: Where the loads stand.
        migrate: Requests move.
        gain: Share of the time to go that a move has to save.
        sibling_gain: Share of its steps that a response saves by drafts where a sibling is on its replica.

    Raises:
        ValueError: ``gain`` or ``sibling_gain`` is no share.
    """

    def __init__(self, fleet: Fleet, migrate: bool = True, gain: float = 0.01, sibling_gain: float = 0.0) -> None:
        if not 0 < gain < 1:
            raise ValueError(f"makespan: gain={gain} must be above 0 and below 1")
        if not 0 <= sibling_gain < 1:
            raise ValueError(f"makespan: sibling_gain={sibling_gain} must be at least 0 and below 1")
        self._fleet = fleet
        self._migrate, self._gain, self._sibling_gain = migrate, gain, sibling_gain
        self._limit, self._bounds = 0, edges(_LIMIT)
        self._names: list[str] = []
        self._version = -1  # the fleet's
        self._state: Floats = np.zeros((0, 2, CELLS))  # sums of the rows of a replica's requests
        self._sums: Floats = np.zeros((0, 3))
        self._runs: dict[str, list[_Run]] = {}
        self._coming: dict[str, tuple[str | None, Floats, Floats, str]] = {}  # planned: replica, rows, sums and plan
        self._compared: dict[str, str] = {}  # replicas as reasons tell them, as of the last plan
        self._together = Together()  # counts where siblings gain
        self._waiting = False
        self._ended = 0  # requests, so far
        self._planned_at = self._looked_at = 0  # of these
        self._looked = False  # since the last plan
        self._mean, self._told = 1000.0, 1.0

    # ---- one ----

    def choose(self, request: Request) -> str | None:
        self._align()
        replica, rows, sums, _ = self._added(request)
        if replica is None or replica in self._fleet:
            return replica
        seconds = self._seconds(self._state + rows, self._sums + sums, self._fleet.capacity)
        least = np.flatnonzero(seconds <= seconds.min() * (1 + 1e-9))
        requests = self._fleet.running[REQUESTS][least]
        return self._fleet.names[int(least[requests.argmin()])]

    def started(self, request: Request, replica: str) -> None:
        self._align()
        planned, rows, sums, plan = self._added(request)
        self._coming.pop(request.id, None)
        at = self._fleet.index[replica]
        self._state[at] += rows
        self._sums[at] += sums
        run = _Run(replica, request, rows, sums, plan if planned == replica else "")
        self._runs.setdefault(request.id, []).append(run)
        if self._sibling_gain:
            self._together.started(request, replica)

    def reason(self, request: Request, replica: str) -> str:
        self._align()
        if not self._compared:
            seconds = self.seconds()
            share = np.rint(10 * seconds / max(float(seconds.max()), 1e-9)).astype(int).tolist()
            self._compared = {
                name: f"that replica takes {10 * tenths}% of the slowest's time"
                for name, tenths in zip(self._fleet.names, share, strict=True)
            }
        for run in self._runs.get(request.id, ()):
            if run.replica == replica:
                return f"{_PLANS[run.plan]}: about {roughly(run.sums[1])} tokens to come, {self._compared[replica]}"
        return ""

    def released(self, request: Request, replica: str, tokens: int | None) -> None:
        self._align()
        runs = self._runs.get(request.id, [])
        at = self._fleet.index.get(replica)
        found = next((i for i, run in enumerate(runs) if run.replica == replica), None)
        if found is None or at is None:
            return
        run = runs.pop(found)
        if not runs:
            del self._runs[request.id]
        if self._sibling_gain:
            self._together.released(request, replica)
        self._state[at] -= run.rows
        self._sums[at] -= run.sums
        if self._sums[at, 0] < 0.5:  # nothing runs: rounding ends here
            self._state[at], self._sums[at] = 0.0, 0.0
        if tokens is not None:
            self._ended += 1
            self._told = min(self._told + 1, 4096.0)
            self._mean += (tokens - self._mean) / self._told

    # ---- many ----

    def coming(self, requests: Sequence[Request]) -> None:
        self._align()
        self._coming.clear()
        self._compared.clear()
        if not requests:
            return
        known = self._known(requests, [request.prompt_tokens for request in requests])
        places, plan = self._places(known, requests)
        where = places.tolist()
        self._waiting = min(where) < 0
        self._planned_at, self._looked = self._ended, False
        names: list[str | None] = [*self._fleet.names, None]
        for request, at, rows, sums in zip(requests, where, known.rows, known.sums, strict=True):
            self._coming[request.id] = names[at], rows, sums, plan

    def due(self) -> bool:
        ended = self._ended - self._planned_at
        return ended > 0 and (self._looked or ended >= _MANY * len(self._runs))

    def watched(self) -> Sequence[str]:
        since, share = (self._planned_at, _SOON) if self._waiting else (self._looked_at, _LATER)
        if not (self._waiting or (self._migrate and len(self._fleet) > 1)):
            return ()
        if self._ended - since < max(1, share * len(self._runs)):
            return ()
        # Of more than that each has its turn, on all replicas alike: what is not known anew seems to take longer.
        turn = list(islice(self._runs, _WATCHED))
        for name in turn:
            self._runs[name] = self._runs.pop(name)
        return turn

    def moves(self, progress: Mapping[str, Progress]) -> Iterator[Move]:
        self._align()
        fleet = self._fleet
        names = [name for name, now in progress.items() if now.ahead is not None and name in self._runs]
        self._looked, self._looked_at = True, self._ended
        if not names:
            return
        had = np.array([self._runs[name][0].request.prompt_tokens + progress[name].made for name in names])
        known = self._known([progress[name] for name in names], had)
        runs = [self._runs[name][0] for name in names]
        at = np.array([fleet.index[run.replica] for run in runs])
        keys = [prompt_of(run.request) for run in runs]
        ways = self._ways(known)
        way = np.array(
            [self._together.came(key, run.replica) > 1 for key, run in zip(keys, runs, strict=True)], np.intp
        )
        rows, sums = (each[way, np.arange(len(names))] for each in ways)
        for name, run, row, sum_ in zip(names, runs, rows, sums, strict=True):
            self._runs[name][0] = run._replace(rows=row, sums=sum_)  # what is known by now counts from now on
        np.add.at(self._state, at, rows - np.stack([run.rows for run in runs]))
        np.add.at(self._sums, at, sums - np.stack([run.sums for run in runs]))
        if self._migrate:
            yield from self._moves(names, keys, at, known.had, (rows, sums), ways)

    def _moves(
        self,
        names: Sequence[str],
        keys: Sequence[str],
        at: np.ndarray,
        had: Floats,
        here: tuple[Floats, Floats],
        ways: tuple[Floats, Floats],
    ) -> Iterator[Move]:
        """What is to move, of requests with these rows and sums where they are, and :meth:`_ways` elsewhere: to a free
        slot, or it would wait there."""
        fleet, rooms, (rows, sums) = self._fleet, self._fleet.capacity, here
        free = fleet.cost.slots - fleet.running[0]
        prefill = fleet.cost.prefill * had
        moved = np.zeros(len(names), bool)
        for _ in range(2 * len(fleet)):
            seconds = self._seconds(self._state, self._sums, fleet.capacity)
            slow = int(seconds.argmax())
            mine = np.flatnonzero((at == slow) & ~moved)
            targets = np.argsort(seconds, kind="stable")
            targets = targets[(targets != slow) & (free[targets] > 0)][:_TARGETS]
            if not len(mine) or not len(targets):
                return
            without = self._seconds(self._state[slow] - rows[mine], self._sums[slow] - sums[mine], rooms[slow])
            way = np.array([[self._together.came(keys[i], fleet.names[t]) > 0 for t in targets] for i in mine], np.intp)
            more_rows, more_sums = (each[way, mine[:, None]] for each in ways)
            there = self._seconds(self._state[targets] + more_rows, self._sums[targets] + more_sums, rooms[targets])
            after = np.maximum(without[:, None], there + prefill[mine][:, None])
            best, target = np.unravel_index(int(after.argmin()), after.shape)
            i, saved = int(mine[best]), float(seconds[slow] - after[best, target])
            if saved < max(self._gain * seconds[slow], prefill[i]):
                return
            moved[i], at[i] = True, targets[target]
            free[slow], free[at[i]] = free[slow] + 1, free[at[i]] - 1
            replica = fleet.names[at[i]]
            self._coming[names[i]] = replica, more_rows[best, target], more_sums[best, target], "moved"
            yield Move(names[i], replica, f"saves {saved:.1f} s of {seconds[slow]:.1f} s")

    def seconds(self) -> Floats:
        """float64[replicas], what each needs for what it has, as of the last look."""
        self._align()
        return self._seconds(self._state, self._sums, self._fleet.capacity)

    # ---- within ----

    def _places(self, known: _Known, requests: Sequence[Request]) -> tuple[np.ndarray, str]:
        """int64[B], column of the replica of each request (-1: it waits), and the plan's name."""
        fleet, step, bounds = self._fleet, self._fleet.cost.step, self._bounds
        cost = step.base, step.row, step.cached, float(fleet.cost.slots)
        rooms = np.minimum(fleet.capacity, _ROOMY)
        none = np.exp(np.minimum(self._state[:, 0], 0))
        now = self.seconds()
        columns = known.beyond, known.had, known.sums[:, 1].copy(), known.sums[:, 2].copy()

        def state() -> tuple[Any, ...]:
            return bounds, none.copy(), self._state[:, 1].copy(), self._sums.copy(), cost, rooms

        longest = (1 - none) @ np.diff(bounds)
        where = np.zeros(len(known.had), np.int64)
        alone = np.full(len(where), -1)
        spread(*columns, *state(), where, now.copy(), alone)
        plans = {"spread": where}
        if self._sibling_gain:
            pairs = Pairs(requests, fleet, self._together)
            plans["pairs"] = np.zeros(len(where), np.int64)
            spread(*columns, *state(), plans["pairs"], now.copy(), pairs.after)
        if len(where) >= 2 * len(fleet):
            order = np.argsort(-columns[2], kind="stable")
            ranked = tuple(column[order] for column in columns)
            replicas = np.argsort(-longest, kind="stable")
            packed = np.zeros(len(where), np.int64)
            low, high = 0.0, max(1e-3, 2 * float(now.max()))
            while not pack(*ranked, *state(), packed, replicas, high):
                low, high = high, 2 * high
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                if pack(*ranked, *state(), packed, replicas, middle):
                    high = middle
                else:
                    low = middle
            pack(*ranked, *state(), packed, replicas, high)
            plans["packed"] = np.empty_like(where)
            plans["packed"][order] = packed
        best = "spread"
        if len(plans) > 1:
            draws = np.random.default_rng(0).random((_DRAWS, len(where)))
            there = bounds, longest, self._sums, cost, rooms
            share = np.ones(len(where))
            judged = {}
            for name, plan in plans.items():
                if self._sibling_gain:
                    share = 1 - self._sibling_gain * pairs.together(plan)
                judged[name] = judge(*columns[:2], *there, plan, draws, share)
            best = min(plans, key=judged.__getitem__)
        admit(*columns, *state(), plans[best])
        return plans[best], best

    def _seconds(self, state: Floats, sums: Floats, room: Floats) -> Floats:
        """As ``packing.seconds``, of any leading shape."""
        cost = self._fleet.cost
        longest = (1 - np.exp(np.minimum(state[..., 0, :], 0))) @ np.diff(self._bounds)
        peak = np.maximum(state[..., 1, :].max(axis=-1), 0)
        count, tokens, held = (np.maximum(sums[..., i], 0) for i in range(3))
        rounds = np.maximum(1, np.maximum(count / cost.slots, peak / room))
        return cost.together(longest, tokens, held, room) + cost.step.base * longest * (1 - 1 / rounds) / 2

    def _known(self, about: Sequence[Request | Progress], had: Sequence[int] | np.ndarray) -> _Known:
        ahead = [each.ahead for each in about]
        first = next((a for a in ahead if a is not None), None)
        if first is not None and first.limit != self._limit and not (self._limit and self._runs):
            self._measure(first.limit)
        beyond = np.zeros((len(about), CELLS))
        told = [i for i, a in enumerate(ahead) if a is not None and a.limit == self._limit]
        if told:
            beyond[told] = np.stack([a.beyond for a in ahead if a is not None and a.limit == self._limit])
        if len(told) < len(about):
            others = sorted(set(range(len(about))) - set(told))
            tokens = [self._tokens(about[i]) for i in others]
            beyond[others] = certain(tokens, 0, int(self._bounds[-1])).beyond
        begin = np.asarray(had, np.float64)
        return _Known(beyond, begin, *self._rows(beyond, begin))

    def _measure(self, limit: int) -> None:
        """Cells reach up to this limit from now on, also of what runs, of which nobody said how long it may be."""
        self._limit, self._bounds = limit, edges(limit)
        self._coming.clear()
        self._state[:], self._sums[:] = 0.0, 0.0
        for runs in self._runs.values():
            for i, run in enumerate(runs):
                known = self._known([run.request], [run.request.prompt_tokens])
                runs[i] = run._replace(rows=known.rows[0], sums=known.sums[0])
                self._state[self._fleet.index[run.replica]] += known.rows[0]
                self._sums[self._fleet.index[run.replica]] += known.sums[0]

    def _rows(self, beyond: Floats, had: Floats, share: float = 1.0) -> tuple[Floats, Floats]:
        """Rows and sums, of chances by cells of steps, a share of one for each token."""
        width, middle = np.diff(self._bounds), (self._bounds[1:] + self._bounds[:-1]) / 2
        caches = beyond * (had[:, None] + middle / share)
        rows = np.stack([np.log1p(-np.minimum(beyond, 1 - _LEAST)), caches], axis=1)
        return rows, np.stack([np.ones(len(had)), beyond @ width, caches @ width], axis=1)

    def _ways(self, known: _Known) -> tuple[Floats, Floats]:
        """Rows and sums, and where that saves steps in a second entry those beside a sibling."""
        if not self._sibling_gain:
            return known.rows[None], known.sums[None]
        share, bounds = 1 - self._sibling_gain, self._bounds
        low, high = bounds[:-1, None] / share, bounds[1:, None] / share  # in tokens, of the cells of steps
        parts = np.maximum(0, np.minimum(high, bounds[1:]) - np.maximum(low, bounds[:-1])) / (high - low)
        rows, sums = self._rows(known.beyond @ parts.T, known.had, share)
        return np.stack([known.rows, rows]), np.stack([known.sums, sums])

    def _added(self, request: Request) -> tuple[str | None, Floats, Floats, str]:
        """Where it is planned for, and what it adds there; empty: nowhere in particular."""
        if (planned := self._coming.get(request.id)) is not None:
            return planned
        known = self._known([request], [request.prompt_tokens])
        return "", known.rows[0], known.sums[0], ""

    def _tokens(self, about: Request | Progress) -> float:
        tokens = about.response_tokens if isinstance(about, Request) else about.left
        return self._mean if tokens is None else max(1, tokens)

    def _align(self) -> None:
        """Rows are the fleet's."""
        if self._version == self._fleet.version:
            return
        self._version = self._fleet.version
        self._compared.clear()
        before = {name: i for i, name in enumerate(self._names)}
        state, sums = self._state, self._sums
        self._names = list(self._fleet.names)
        self._state, self._sums = np.zeros((len(self._names), 2, CELLS)), np.zeros((len(self._names), 3))
        for i, name in enumerate(self._names):
            if (j := before.get(name)) is not None:
                self._state[i], self._sums[i] = state[j], sums[j]
