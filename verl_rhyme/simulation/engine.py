"""One replica in virtual time: continuous batching with slots, a bounded KV cache, preemption and drafts.

All running requests advance one step together. The step at which a request finishes is known when it starts, so that
nothing is computed between two events. Steps are a continuous quantity; they become longer as the cache grows, which
is integrated exactly. :mod:`verl_rhyme.planning.cost` has the cost of a step.

A queued request is admitted when a slot and KV cache for its tokens are free, by priority and then by arrival. When
the cache is full, the request admitted last is preempted: it goes to the front of the queue and its tokens are
recomputed (vLLM's preemption by recomputation).

What requests leave in the cache is evicted when room is needed, the oldest first (vLLM's prefix cache). A request finds
there its prompt, of a sibling, and its own context, of its sample's turn before. Evicted contexts may be in host memory
(vLLM's KV offloading), from which they are loaded.
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
#: Maximum prompts and contexts that stay cached after their last request has left.
_KEPT = 1 << 14


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
    context: float = 0.0  # tokens between prompt and response: the sample's earlier turns, tool answers included
    cached: float = -1.0  # tokens before the response that were in the cache at its admission; -1 before


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


class _Kept(OrderedDict[Hashable, float]):
    """Tokens in a cache by what keeps them, the oldest first; ``tokens`` in all, at most ``room``."""

    def __init__(self, room: float) -> None:
        super().__init__()
        self.room, self.tokens = room, 0.0

    def put(self, key: Hashable, tokens: float) -> None:
        self.take(key)
        if tokens > 0:
            self[key] = tokens
            self.tokens += tokens

    def take(self, key: Hashable) -> float:
        tokens = self.pop(key, 0.0)
        self.tokens = self.tokens - tokens if self else 0.0
        return tokens

    def trim(self, used: float = 0.0) -> None:
        """Evict what does not fit beside ``used`` tokens."""
        while self and (len(self) > _KEPT or self.tokens + used > self.room):
            key, tokens = next(iter(self.items()))
            over = self.tokens + used - self.room
            if len(self) > _KEPT or tokens <= over:
                self.take(key)
            else:
                self[key] = tokens - over
                self.tokens -= over
                return


class Engine:
    """A simulated replica. Time is an argument of its methods and never decreases.

    It has ``made`` and ``prefilled`` tokens in all, and ``preempted`` requests; ``on_segment`` is called for each
    segment that ends.
    """

    def __init__(self, cost: ReplicaCost, on_segment: Callable[[Segment], None] | None = None) -> None:
        self.cost = cost
        self.made = self.prefilled = 0.0
        self.preempted = 0
        self._on_segment = on_segment
        self._now = self._steps = self._stall = 0.0
        self._cached = self._pace = self._drafts = 0.0  # sums over running requests
        self._running: dict[Hashable, _Run] = {}  # in the order of admission
        self._ends: list[tuple[float, int, Hashable]] = []
        self._queue: list[tuple[float, int, Request]] = []
        self._queued: dict[Hashable, tuple[int, Request]] = {}
        self._users: dict[Hashable, int] = {}  # running requests by prompt
        self._kept, self._host = _Kept(cost.room), _Kept(cost.host)
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

    def __contains__(self, name: Hashable) -> bool:
        return name in self._running or name in self._queued

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
        """Drop what the cache keeps: the weights have changed."""
        self._kept, self._host = _Kept(self.cost.room), _Kept(self.cost.host)

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
        self._kept.trim(self._cached)

    def _emitted(self, run: _Run) -> float:
        return min(run.request.tokens, run.request.emitted + run.request.pace * (self._steps - run.at))

    def _admit(self) -> None:
        while self._queue and len(self._running) < self.cost.slots:
            _, order, request = self._queue[0]
            if self._queued.get(request.name, (None,))[0] != order:  # withdrawn, or queued again
                heapq.heappop(self._queue)
                continue
            own, first = request.context + request.emitted, request.prompt not in self._users
            if self._running and self._cached + own + first * request.prompt_tokens + request.pace > self.cost.room:
                return
            heapq.heappop(self._queue)
            del self._queued[request.name]
            prompt = min(self._kept.take(request.prompt), request.prompt_tokens) if first else request.prompt_tokens
            hit = min(self._kept.take((request.prompt, request.name)), own)
            loaded = max(0.0, min(self._host.take((request.prompt, request.name)), own) - hit)
            if request.cached < 0:  # a preempted request was counted
                request = request._replace(cached=prompt + hit + loaded)
            self._count += 1
            run = _Run(request, self._now, self._steps, self._count)
            self._running[request.name] = run
            end = run.at + max(0.0, request.tokens - request.emitted) / request.pace
            heapq.heappush(self._ends, (end, run.admitted, request.name))
            self._users[request.prompt] = self._users.get(request.prompt, 0) + 1
            self._cached += own + first * request.prompt_tokens
            self._pace += request.pace
            self._drafts += request.drafts
            prefilled = own - hit - loaded + request.prompt_tokens - prompt
            self.prefilled += prefilled
            self._stall += self.cost.prefill * prefilled + self.cost.load * loaded
            self._kept.trim(self._cached)

    def _leave(self, run: _Run, reason: str) -> None:
        request, emitted = run.request, self._emitted(run)
        del self._running[request.name]
        self._cached -= request.context + emitted
        self._pace -= request.pace
        self._drafts -= request.drafts
        self._users[request.prompt] -= 1
        for kept in (self._kept, self._host):
            kept.put((request.prompt, request.name), request.context + emitted)
        if not self._users[request.prompt]:
            del self._users[request.prompt]
            self._cached -= request.prompt_tokens
            self._kept.put(request.prompt, request.prompt_tokens)
        if not self._running:
            self._cached = self._pace = self._drafts = self._stall = 0.0
        self._kept.trim(self._cached)
        self._host.trim()
        if self._on_segment is not None:
            self._on_segment(Segment(request, run.began, self._now, emitted, reason))

    def _preempt(self) -> None:
        run = self._running[next(reversed(self._running))]
        emitted = self._emitted(run)
        self._leave(run, "preempted")
        self.preempted += 1
        self._front -= 1
        self._enqueue(run.request._replace(emitted=emitted), self._front)
