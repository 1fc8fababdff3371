"""Replicas in virtual time: engines with their policy versions, and the requests that wait for a version."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from verl_rhyme.simulation.cluster import Cluster
from verl_rhyme.simulation.engine import Engine, Request


class Replicas:
    """Engines by name, on one clock. ``done`` is called for each finished request with its replica's name."""

    def __init__(self, engines: dict[str, Engine], done: Callable[[str, Request], None], slots: int) -> None:
        self.cluster = Cluster(engines, done, slots)
        self.versions = dict.fromkeys(engines, 0)
        self.arrived = 0  # newest version that they can load
        self.stopped = False  # no request runs
        self._gates: dict[str, dict[Hashable, tuple[int, Request]]] = {name: {} for name in engines}

    def submit(self, replica: str, version: int, request: Request) -> None:
        """Submit a request; it waits while the replica is stopped, or has an older version than it needs."""
        if self.stopped or version > self.versions[replica]:
            self._gates[replica][request.name] = version, request
        else:
            self.cluster.engines[replica].submit(request, self.cluster.now)
        self.update_if_idle(replica)
        self.cluster.reschedule(replica)

    def withdraw(self, replica: str, name: Hashable) -> tuple[Request, float] | None:
        """Remove a request and return it with its response tokens; ``None`` if the replica has no such request."""
        engine = self.cluster.engines[replica]
        if (waited := self._gates[replica].pop(name, None)) is not None:
            return waited[1], waited[1].emitted
        if name not in engine:
            return None
        taken = engine.withdraw(name, self.cluster.now)
        self.update_if_idle(replica)
        self.cluster.reschedule(replica)
        return taken

    def withdraw_all(self, replica: str) -> list[tuple[Request, float]]:
        """Remove the requests of an engine; return them with their response tokens, running ones first."""
        taken = self.cluster.engines[replica].withdraw_all(self.cluster.now)
        self.cluster.reschedule(replica)
        return taken

    def hold(self, replica: str, requests: list[Request]) -> None:
        """Keep withdrawn requests until the next version; they go first then."""
        self._gates[replica] = {**{each.name: (0, each) for each in requests}, **self._gates[replica]}

    def progress(self, replica: str, name: Hashable) -> float | None:
        """Return the response tokens of a request at the engine; ``None`` if it is not there."""
        engine = self.cluster.engines[replica]
        return engine.progress(name, self.cluster.now) if name in engine else None

    def update_if_idle(self, replica: str) -> None:
        engine = self.cluster.engines[replica]
        if not (self.versions[replica] == self.arrived or engine.running or engine.waiting or self.stopped):
            self.set_newest_version(replica)

    def set_newest_version(self, replica: str) -> None:
        self.versions[replica] = self.arrived
        self.cluster.engines[replica].forget()
        waited, self._gates[replica] = self._gates[replica], {}
        for version, request in waited.values():
            self.submit(replica, version, request)
