"""Discrete-event simulation of replicas on one clock: a heap of the next events."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

from verl_rhyme.simulation.engine import Engine, Request


class Cluster:
    """Event loop over engines and calls; events of equal times run in the order in which they were scheduled.

    A caller that changes an engine must call :meth:`reschedule`. ``done`` is called for each finished request with the
    engine's name, ``occupied`` for each change of the number of requests in slots with the time.
    """

    def __init__(
        self,
        engines: dict[str, Engine],
        done: Callable[[str, Request], None],
        occupied: Callable[[float, int], None] = lambda now, running: None,
    ) -> None:
        self.engines = engines
        self.now = 0.0
        self._done, self._occupied = done, occupied
        self._rows = dict.fromkeys(engines, 0)
        self._running = 0
        self._heap: list[tuple[float, int, str | None, Any]] = []
        self._stamps = dict.fromkeys(engines, 0)
        self._count = 0

    def call(self, after: float, what: Callable[[], None]) -> None:
        self._push(self.now + after, None, what)

    def reschedule(self, name: str) -> None:
        engine = self.engines[name]
        self._count_running(name, engine.running)
        self._stamps[name] += 1
        if (when := engine.next_event()) < math.inf:
            self._push(max(when, self.now), name, self._stamps[name])

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self._heap and not until():
            when, _, name, what = heapq.heappop(self._heap)
            if name is None:
                self.now = when
                what()
            elif self._stamps[name] == what:
                self.now = when
                for request in self.engines[name].step(when):
                    self._done(name, request)
                self.reschedule(name)

    def _count_running(self, name: str, rows: int) -> None:
        change = rows - self._rows[name]
        if change:
            self._rows[name] = rows
            self._running += change
            self._occupied(self.now, self._running)

    def _push(self, when: float, name: str | None, what: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, name, what))
