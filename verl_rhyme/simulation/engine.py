"""One replica in virtual time: continuous batching with slots, a bounded KV cache, preemption and drafts.

All running requests advance one step together. The step at which a request finishes is known when it starts, so that
nothing is computed between two events. Steps are a continuous quantity; they become longer as the cache grows, which
is integrated exactly. :mod:`verl_rhyme.planning.cost` has the cost of a step.

A queued request is admitted when a slot and KV cache for its tokens are free, by priority and then by arrival. When
the cache is full, the request admitted last is preempted: it goes to the front of the queue and its tokens are
recomputed (vLLM's preemption by recomputation).
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from verl_rhyme.planning.cost import ReplicaCost

#: Steps by which a request may be early and still count as finished: rounding of times.
_ROUNDING = 1e-6
#: Maximum prompts whose prefix stays cached after their last request has left.
_KEPT_PREFIXES = 4096


class Request(NamedTuple):
    """A generation request."""

    name: Hashable  # of the attempt, unique in an engine
    prompt: Hashable  # requests of one prompt share its prefix
    prompt_tokens: int
    tokens: float  # of the response when it finishes
    emitted: float = 0.0  # of these, generated before in other requests
    priority: float = 0.0  # lowest first
    pace: float = 1.0  # tokens per step, drafts included: the acceptance length
    drafts: float = 0.0  # draft tokens verified per step


class Segment(NamedTuple):
    """A time span of a request in a slot; ``reason`` of its end: ``done``, ``preempted`` or ``withdrawn``."""

    request: Request
    began: float
    ended: float
    emitted: float
    reason: str


@dataclass(slots=True)
class _Run:
    request: Request
    began: float
    at: float  # steps of the engine
    admitted: int


class Engine:
    """A simulated replica. Time is an argument of its methods and never decreases.

    It has ``made`` tokens in all, and ``preempted`` requests; ``on_segment`` is called for each segment that ends.
    """

    def __init__(self, cost: ReplicaCost, on_segment: Callable[[Segment], None] | None = None) -> None:
        self.cost = cost
        self.made = 0.0
        self.preempted = 0
        self._on_segment = on_segment
        self._now = self._steps = self._stall = 0.0
        self._cached = self._pace = self._drafts = 0.0  # sums over running requests
        self._running: dict[Hashable, _Run] = {}  # in the order of admission
        self._ends: list[tuple[float, int, Hashable]] = []
        self._queue: list[tuple[float, int, Request]] = []
        self._queued: dict[Hashable, tuple[int, Request]] = {}
        self._users: dict[Hashable, int] = {}  # running requests by prompt
        self._kept: OrderedDict[Hashable, None] = OrderedDict()
        self._count = self._front = 0

    # ---- state ----

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queued)

    @property
    def cached(self) -> float:
        """At the last event, in tokens."""
        return self._cached

    def names(self) -> list[Hashable]:
        return [*self._running, *self._queued]

    # ---- events ----

    def submit(self, request: Request, now: float) -> None:
        self._advance(now)
        self._count += 1
        self._enqueue(request, self._count)
        self._admit()

    def withdraw(self, name: Hashable, now: float) -> tuple[Request, float]:
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
        self._advance(now)
        return self._queued[name][1].emitted if name in self._queued else self._emitted(self._running[name])

    def withdraw_all(self, now: float) -> list[tuple[Request, float]]:
        """Remove all requests; return them with their response tokens, running ones first."""
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
        """Drop the cached prefixes: the weights have changed."""
        self._kept.clear()

    def next_event(self) -> float:
        """Return the time at which the next request finishes or is preempted; infinite if none runs."""
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
        """Advance to ``now``, at most :meth:`next_event`, and yield the finished requests."""
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

    # ---- internals ----

    def _enqueue(self, request: Request, order: int) -> None:
        self._queued[request.name] = order, request
        heapq.heappush(self._queue, (request.priority, order, request))

    def _step_seconds(self) -> tuple[float, float]:
        """Return the seconds of the next step, and those by which each further one is longer.

        Drafts are verified where they gain (``drafting.weigh_cost``); else as many tokens take more steps, whose tokens
        requests share by their pace.
        """
        rows, step = len(self._running), self.cost.step
        growth, more = step.cached * self._pace, self._pace / rows
        plain, drafted = step.seconds(rows, self._cached) * more, step.seconds(rows, self._cached, self._drafts)
        return (plain, growth * more) if plain < drafted else (drafted, growth)

    def _seconds(self, steps: float) -> float:
        """Return the seconds of ``steps`` steps from now on; each one makes the cache larger."""
        first, growth = self._step_seconds()
        return steps * (first + growth * steps / 2)

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
        first, growth = self._step_seconds()
        # Root n of growth/2 n^2 + first n = passed, in a form that stays accurate as growth goes to 0.
        steps = 2 * passed / (first + math.sqrt(first * first + 2 * growth * passed))
        self._steps += steps
        self._cached += steps * self._pace
        self.made += steps * self._pace

    def _emitted(self, run: _Run) -> float:
        return min(run.request.tokens, run.request.emitted + run.request.pace * (self._steps - run.at))

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.cost.slots:
            _, order, request = self._queue[0]
            if self._queued.get(request.name, (None,))[0] != order:  # withdrawn, or queued again
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
            self._users[request.prompt] = self._users.get(request.prompt, 0) + 1
            self._kept.pop(request.prompt, None)
            self._cached += own
            self._pace += request.pace
            self._drafts += request.drafts
            self._stall += self.cost.prefill * (request.emitted + (0 if shared else request.prompt_tokens))

    def _leave(self, run: _Run, reason: str) -> None:
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
        if self._on_segment is not None:
            self._on_segment(Segment(request, run.began, self._now, emitted, reason))

    def _preempt(self) -> None:
        run = self._running[next(reversed(self._running))]
        emitted = self._emitted(run)
        self._leave(run, "preempted")
        self.preempted += 1
        self._front -= 1
        self._enqueue(run.request._replace(emitted=emitted), self._front)
