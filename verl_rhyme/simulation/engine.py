"""One replica in virtual time: an engine with continuous batching, slots, a bounded KV cache, preemption and drafts.

All its requests advance a step together, so that the engine counts steps, and a request is done at a step that is known
when it begins: between two events nothing is computed. Steps are a continuous quantity here. As caches grow steps
become longer, which is integrated exactly. What :mod:`verl_rhyme.planning.cost` says of a step holds.

A queued request is admitted when a slot and room for what it has are free, by priority and then in the order of coming.
When the cache is full the one admitted last gives way, goes to the front of the queue and has its tokens computed anew
(vLLM's preemption by recomputation).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from verl_rhyme.planning.cost import ReplicaCost

#: Steps by which one counts as done all the same: rounding of times.
_ROUNDING = 1e-6
#: Prompts whose prefix stays cached after their last request has left.
_KEPT_PREFIXES = 4096


class Request(NamedTuple):
    """What an engine is to generate.

    Attributes:
        name: Of the attempt, no two alike in an engine.
        prompt: Requests of one prompt share its prefix.
        prompt_tokens: Of that.
        tokens: Response tokens it has at its end.
        emitted: Those that it brings along, from before.
        priority: Lowest first.
        pace: Tokens a step, drafts included: the acceptance length.
        drafts: Draft tokens that are verified for it in a step.
    """

    name: Hashable
    prompt: Hashable
    prompt_tokens: int
    tokens: float
    emitted: float = 0.0
    priority: float = 0.0
    pace: float = 1.0
    drafts: float = 0.0


class Segment(NamedTuple):
    """A stretch of a request in a slot, for pictures.

    Attributes:
        request: Whose.
        began, ended: When.
        emitted: Tokens that it had at the end of the stretch.
        why: It ended: ``done``, ``preempted`` or ``withdrawn``.
    """

    request: Request
    began: float
    ended: float
    emitted: float
    why: str


@dataclass(slots=True)
class _Run:
    request: Request
    began: float
    at: float  # steps of the engine
    admitted: int


class Engine:
    """See the module. Time comes in as an argument and never goes back.

    Args:
        cost: Of its kind.
        told: Is called with each segment that ends; ``None``: nobody is interested.

    Attributes:
        made: Tokens that it has emitted.
        preempted: How often one gave way.
        recomputed: Tokens that were prefilled though they had been computed before.
    """

    def __init__(self, cost: ReplicaCost, told: Callable[[Segment], None] | None = None) -> None:
        self.cost = cost
        self.made = self.recomputed = 0.0
        self.preempted = 0
        self._told = told
        self._now = self._steps = self._stall = 0.0
        self._cached = self._pace = self._drafts = 0.0  # of all that run
        self._running: dict[Hashable, _Run] = {}
        self._ends: list[tuple[float, int, Hashable]] = []
        self._admissions: list[tuple[int, Hashable]] = []
        self._queue: list[tuple[float, int, Request]] = []
        self._queued: dict[Hashable, tuple[int, Request]] = {}
        self._users: dict[Hashable, int] = {}  # of a prefix
        self._kept: OrderedDict[Hashable, None] = OrderedDict()
        self._count = self._front = 0

    # ---- what there is ----

    @property
    def running(self) -> int:
        """Requests in slots."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queued)

    @property
    def cached(self) -> float:
        """Tokens in the KV cache, as of the last event."""
        return self._cached

    def names(self) -> list[Hashable]:
        """Of all its requests."""
        return [*self._running, *self._queued]

    def emitted(self, name: Hashable) -> float:
        """Tokens that a running request has, as of the last event."""
        return self._emitted(self._running[name])

    # ---- what happens ----

    def submit(self, request: Request, now: float) -> None:
        """A request comes."""
        self._advance(now)
        self._count += 1
        self._enqueue(request, self._count)
        self._admit()

    def withdraw(self, name: Hashable, now: float) -> tuple[Request, float]:
        """A request is taken back, with the tokens it has.

        Raises:
            KeyError: It is not here.
        """
        self._advance(now)
        if name in self._queued:
            request = self._queued.pop(name)[1]
            return request, request.emitted
        run = self._running[name]
        emitted = self._emitted(run)
        self._leave(run, "withdrawn")
        self._admit()
        return run.request, emitted

    def progress(self, name: Hashable, now: float) -> float:
        """Tokens that a request has.

        Raises:
            KeyError: It is not here.
        """
        self._advance(now)
        return self._queued[name][1].emitted if name in self._queued else self._emitted(self._running[name])

    def withdraw_all(self, now: float) -> list[tuple[Request, float]]:
        """All requests are taken back: those that run, and those that wait, with the tokens they have."""
        self._advance(now)
        runs = list(self._running.values())
        taken = [(run.request, self._emitted(run)) for run in runs]
        for run in runs:
            self._leave(run, "withdrawn")
        waiting = sorted(self._queued.values(), key=lambda entry: (entry[1].priority, entry[0]))
        taken += [(request, request.emitted) for _, request in waiting]
        self._queue, self._queued = [], {}
        return taken

    def forget(self) -> None:
        """The cached prefixes are those of other weights."""
        self._kept.clear()

    def next_event(self) -> float:
        """When the next request is done, or gives way, unless something happens before; infinite if never."""
        if not self._running:
            return math.inf
        steps = math.inf
        while self._ends:
            end, order, name = self._ends[0]
            run = self._running.get(name)
            if run is not None and run.admitted == order:
                steps = max(0.0, end - self._steps)
                break
            heapq.heappop(self._ends)
        if len(self._running) > 1:
            steps = min(steps, max(0.0, (self.cost.room - self._cached) / self._pace))
        return self._now + self._stall + self._seconds(steps)

    def step(self, now: float) -> Iterator[Request]:
        """Let time pass until ``now``, at most :meth:`next_event`: those that are done by then."""
        self._advance(now)
        while self._ends and self._ends[0][0] <= self._steps + _ROUNDING:
            _, order, name = heapq.heappop(self._ends)
            run = self._running.get(name)
            if run is not None and run.admitted == order:
                self._leave(run, "done")
                yield run.request
        while len(self._running) > 1 and self._cached >= self.cost.room - _ROUNDING * self._pace:
            self._preempt()
        self._admit()

    # ---- within ----

    def _enqueue(self, request: Request, order: int) -> None:
        self._queued[request.name] = order, request
        heapq.heappush(self._queue, (request.priority, order, request))

    def _step_seconds(self) -> float:
        return self.cost.step.seconds(len(self._running), self._cached, self._drafts)

    def _seconds(self, steps: float) -> float:
        """Of so many steps from now on; each makes the cache larger."""
        growth = self.cost.step.cached * self._pace
        return steps * (self._step_seconds() + growth * steps / 2)

    def _advance(self, now: float) -> None:
        passed = now - self._now
        if passed <= 0:
            return
        self._now = now
        if not self._running:
            return
        stalled = min(passed, self._stall)
        self._stall -= stalled
        passed -= stalled
        if passed <= 0:
            return
        first, growth = self._step_seconds(), self.cost.step.cached * self._pace
        # The root of growth/2 n^2 + first n = passed, in a form that stays exact for little growth.
        steps = 2 * passed / (first + math.sqrt(first * first + 2 * growth * passed))
        self._steps += steps
        self._cached += steps * self._pace
        self.made += steps * self._pace

    def _emitted(self, run: _Run) -> float:
        return min(run.request.tokens, run.request.emitted + run.request.pace * (self._steps - run.at))

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.cost.slots:
            _, order, request = self._queue[0]
            if self._queued.get(request.name, (None,))[0] != order:  # withdrawn, or here anew
                heapq.heappop(self._queue)
                continue
            shared = request.prompt in self._users or request.prompt in self._kept
            own = request.emitted + (0 if request.prompt in self._users else request.prompt_tokens)
            if self._running and self._cached + own + request.pace > self.cost.room:
                return
            heapq.heappop(self._queue)
            del self._queued[request.name]
            self._count += 1
            run = _Run(request, self._now, self._steps, self._count)
            self._running[request.name] = run
            end = run.at + max(0.0, request.tokens - request.emitted) / request.pace
            heapq.heappush(self._ends, (end, run.admitted, request.name))
            self._admissions.append((run.admitted, request.name))
            if len(self._admissions) > 4 * self.cost.slots:
                self._admissions = [(r.admitted, name) for name, r in self._running.items()]
            self._users[request.prompt] = self._users.get(request.prompt, 0) + 1
            self._kept.pop(request.prompt, None)
            self._cached += own
            self._pace += request.pace
            self._drafts += request.drafts
            self._stall += self.cost.prefill * (request.emitted + (0 if shared else request.prompt_tokens))
            self.recomputed += request.emitted

    def _leave(self, run: _Run, why: str) -> None:
        request, emitted = run.request, self._emitted(run)
        del self._running[request.name]
        self._cached -= emitted
        self._pace -= request.pace
        self._drafts -= request.drafts
        self._users[request.prompt] -= 1
        if not self._users[request.prompt]:
            del self._users[request.prompt]
            self._cached -= request.prompt_tokens
            self._kept[request.prompt] = None
            if len(self._kept) > _KEPT_PREFIXES:
                self._kept.popitem(last=False)
        if not self._running:
            self._cached = self._pace = self._drafts = self._stall = 0.0
        if self._told is not None:
            self._told(Segment(request, run.began, self._now, emitted, why))

    def _preempt(self) -> None:
        """The one admitted last."""
        while True:
            admitted, name = self._admissions.pop()
            run = self._running.get(name)
            if run is not None and run.admitted == admitted:
                break
        emitted = self._emitted(run)
        self._leave(run, "preempted")
        self.preempted += 1
        self._front -= 1
        self._enqueue(run.request._replace(emitted=emitted), self._front)
