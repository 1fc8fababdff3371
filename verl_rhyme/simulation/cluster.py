"""Replicas on one clock: a heap of what happens next."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

from verl_rhyme.simulation.engine import Engine, Request


class Cluster:
    """Engines and calls, in the order of time; of equal times, in the order in which they were announced.

    Whoever changes an engine tells so with :meth:`touch`.

    Args:
        engines: By name.
        done: Is called with an engine's name and each request that is done there.
        occupied: Is called with the time and the requests in slots, whenever these are others.

    Attributes:
        now: Seconds.
        events: That came to pass.
    """

    def __init__(
        self,
        engines: dict[str, Engine],
        done: Callable[[str, Request], None],
        occupied: Callable[[float, int], None] = lambda now, running: None,
    ) -> None:
        self.engines = engines
        self.now = 0.0
        self.events = 0
        self._done, self._occupied = done, occupied
        self._rows = dict.fromkeys(engines, 0)
        self._running = 0
        self._heap: list[tuple[float, int, str | None, Any]] = []
        self._stamps = dict.fromkeys(engines, 0)
        self._count = 0

    def call(self, after: float, what: Callable[[], None]) -> None:
        """In so many seconds."""
        self._push(self.now + after, None, what)

    def touch(self, name: str) -> None:
        """An engine's next event may be another one now."""
        engine = self.engines[name]
        self._settle(name, engine.running)
        self._stamps[name] += 1
        if (when := engine.next_event()) < math.inf:
            self._push(max(when, self.now), name, self._stamps[name])

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is announced any more, or ``until`` says so after an event."""
        while self._heap and not until():
            when, _, name, what = heapq.heappop(self._heap)
            if name is None:
                self.now = when
                self.events += 1
                what()
            elif self._stamps[name] == what:
                self.now = when
                self.events += 1
                for request in self.engines[name].step(when):
                    self._done(name, request)
                self.touch(name)

    def _settle(self, name: str, rows: int) -> None:
        change = rows - self._rows[name]
        if change:
            self._rows[name] = rows
            self._running += change
            self._occupied(self.now, self._running)

    def _push(self, when: float, name: str | None, what: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, name, what))
