"""Account of running requests by replica, and the choice of a replica for each request."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_rhyme.placement.fleet import Fleet
from verl_rhyme.placement.histopipe import HistoPipe
from verl_rhyme.placement.least_loaded import LeastLoaded
from verl_rhyme.placement.longest_first import LongestFirst
from verl_rhyme.placement.policy import Load, Move, PlacementPolicy, Progress, Request
from verl_rhyme.placement.skewness_aware import SkewnessAware
from verl_rhyme.planning.cost import TYPICAL, ReplicaCost

POLICIES: dict[str, Callable[..., PlacementPolicy]] = {
    "least_loaded": LeastLoaded,
    "longest_first": LongestFirst,
    "histopipe": HistoPipe,
    "skewness_aware": SkewnessAware,
}


class NoReplica(RuntimeError):
    """No replica is available for a request."""


class Placement:
    """Events of a fleet, and the policy that chooses replicas. A failing policy costs balance, never a request.

    Args:
        policy: Name in :data:`POLICIES`.
        options: Options of the policy.
        cost: Cost of a replica's work, for policies that use it.

    Attributes:
        fleet: Replicas and loads.
        errors: Number of failed policy calls.
        last_error: Call, type and text of the latest error.

    Raises:
        ValueError: Unknown policy.
        TypeError: Unknown option.
    """

    def __init__(
        self,
        policy: str = "least_loaded",
        options: dict[str, Any] | None = None,
        cost: ReplicaCost = TYPICAL,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"placement.policy={policy!r} is unknown: choose {', '.join(sorted(POLICIES))}")
        self.fleet = Fleet(cost)
        self.policy = POLICIES[policy](self.fleet, **(options or {}))
        self.errors = 0
        self.last_error = ""
        self._running: dict[str, list[tuple[Request, str]]] = {}
        self._random = random.Random(0)

    def add(self, replica: str) -> None:
        """Add a replica; a known replica is unchanged."""
        self.fleet.add(replica)

    def remove(self, replica: str) -> bool:
        """Remove a replica and forget its requests; return false for an unknown replica."""
        if replica not in self.fleet:
            return False
        for request_id in [name for name, runs in self._running.items() if any(at == replica for _, at in runs)]:
            while self.release(request_id, replica):
                pass
        self.fleet.remove(replica)
        return True

    def report(self, replica: str, capacity: int) -> None:
        """Set the KV tokens that fit into a replica's cache, at least 1; unknown replicas are ignored."""
        if replica in self.fleet:
            self.fleet.report(replica, capacity)

    def acquire(self, request: Request) -> str:
        """Return the replica for a request, which counts there until it is released.

        Raises:
            NoReplica: The fleet is empty.
        """
        if not self.fleet:
            raise NoReplica("No available servers in load balancer")
        replica = request.replica if request.replica in self.fleet else self._choose(request)
        self._settle(request, replica)
        return replica

    def release(self, request_id: str, replica: str, tokens: int | None = None) -> bool:
        """Release a request; return false if it does not run there (its replica may have left).

        Args:
            request_id: Id of the request.
            replica: Replica on which it ran.
            tokens: Tokens it added there; ``None`` where unknown.
        """
        runs = self._running.get(request_id, [])
        for i, (request, at) in enumerate(runs):
            if at == replica:
                del runs[i]
                if not runs:
                    del self._running[request_id]
                self.fleet.run(replica, -1, -request.tokens)
                self._notify("released", request, replica, tokens)
                return True
        return False

    def plan(self, step: int, loads: Sequence[Load]) -> None:
        """Plan the prompts of training step ``step``."""
        if self.fleet:
            self._notify("plan", step, loads)

    def reason(self, request_id: str) -> str:
        """Return the reason for a running request's replica; empty where unknown."""
        for request, replica in self._running.get(request_id, []):
            return str(self._call("", "reason", request, replica))
        return ""

    def watched(self) -> list[str]:
        """Return ids of running requests whose progress :meth:`moves` needs."""
        return [name for name in self._call((), "watched") if name in self._running]

    def left(self, keys: Sequence[str]) -> None:
        """Forget planned prompts that have left."""
        self._notify("left", keys)

    def moves(self, progress: Mapping[str, Progress]) -> list[Move]:
        """Return the policy's moves, and count each moved request, with its tokens, on its new replica.

        Args:
            progress: Progress by request id.
        """
        moved = []
        try:
            for move in self.policy.moves(progress):
                runs = self._running.get(move.id)
                if not runs or move.replica not in self.fleet or runs[0][1] == move.replica:
                    continue
                request, replica = runs[0]
                made, left, p90 = progress[move.id]
                self.release(move.id, replica)
                prompt = request.prompt_tokens + made
                request = request._replace(prompt_tokens=prompt, response_tokens=left, p90_tokens=p90)
                self._settle(request, move.replica)
                moved.append(move)
        except Exception as error:
            self._failed(f"moves: {type(error).__name__}: {error}")
        return moved

    def _settle(self, request: Request, replica: str) -> None:
        self.fleet.run(replica, 1, request.tokens)
        self._running.setdefault(request.id, []).append((request, replica))
        self._notify("started", request, replica)

    def _choose(self, request: Request) -> str:
        try:
            replica = self.policy.choose(request)
            if isinstance(replica, str) and replica in self.fleet:
                return replica
            self._failed(f"choose returned {replica!r}, which is no replica")
        except Exception as error:
            self._failed(f"choose: {type(error).__name__}: {error}")
        least = self.fleet.least()
        return self.fleet.names[least[self._random.randrange(len(least))]]

    def _notify(self, event: str, *about: Any) -> None:
        self._call(None, event, *about)

    def _call(self, otherwise: Any, event: str, *about: Any) -> Any:
        try:
            return getattr(self.policy, event)(*about)
        except Exception as error:
            self._failed(f"{event}: {type(error).__name__}: {error}")
            return otherwise

    def _failed(self, why: str) -> None:
        self.errors += 1
        self.last_error = why
