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
    engine's name; ``slots`` is Q of :func:`~verl_rhyme.observability.metrics.bubble_ratio`.
    """

    def __init__(self, engines: dict[str, Engine], done: Callable[[str, Request], None], slots: int) -> None:
        self.engines = engines
        self.now = 0.0
        self._done, self._slots = done, slots
        self._rows = dict.fromkeys(engines, 0)
        self._running = self._counted = 0
        self._counted_at = self._busy = self._room = 0.0
        self._heap: list[tuple[float, int, str | None, Any]] = []
        self._stamps = dict.fromkeys(engines, 0)
        self._count = 0

    def call(self, after: float, what: Callable[[], None]) -> None:
        self._push(self.now + after, None, what)

    def reschedule(self, name: str) -> None:
        engine = self.engines[name]
        if change := engine.running - self._rows[name]:
            self._rows[name] = engine.running
            self._running += change
            self._set_running(self._running)
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

    def count_running(self) -> None:
        """Count the seconds of busy slots until now."""
        self._set_running(sum(engine.running for engine in self.engines.values()))

    def end_interval(self) -> float:
        """Return the bubble ratio from the last call until the latest change of the running requests."""
        busy, room = self._busy, self._room
        self._busy = self._room = 0.0
        return 1.0 - busy / room if room > 0 else 0.0

    def _set_running(self, running: int) -> None:
        passed = self.now - self._counted_at
        self._busy += passed * min(self._counted, self._slots)
        self._room += passed * self._slots
        self._counted_at, self._counted = self.now, running

    def _push(self, when: float, name: str | None, what: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, name, what))
