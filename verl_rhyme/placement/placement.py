"""Account of running requests by replica, and the choice of a replica for each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_rhyme.placement.fleet import Fleet
from verl_rhyme.placement.histopipe import HistoPipe
from verl_rhyme.placement.policy import LeastLoaded, Load, LongestFirst, Move, PlacementPolicy, Progress, Request
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
    """Events of a fleet, and the policy that chooses replicas. A failing policy costs balance, never a request."""

    def __init__(
        self,
        policy: str = "least_loaded",
        options: dict[str, Any] | None = None,
        cost: ReplicaCost = TYPICAL,
    ) -> None:
        self.fleet = Fleet(cost)
        self.policy = POLICIES[policy](self.fleet, **(options or {}))
        self.errors = 0  # failed policy calls
        self.last_error = ""  # call, type and text
        self._fallback = LeastLoaded(self.fleet, seed=0)
        self._running: dict[str, tuple[Request, str]] = {}  # request and its replica, by id

    def remove(self, replica: str) -> None:
        for request_id in [request_id for request_id, (_, at) in self._running.items() if at == replica]:
            self.release(request_id)
        self.fleet.remove(replica)

    def acquire(self, request: Request) -> str:
        """Return the replica for a request, which counts there until it is released or acquired again.

        Raises :class:`NoReplica` if the fleet is empty.
        """
        if not self.fleet:
            raise NoReplica("No available servers in load balancer")
        self.release(request.id)
        replica = request.replica if request.replica in self.fleet else self._choose(request)
        self._count(request, replica)
        return replica

    def release(self, request_id: str, tokens: int | None = None) -> None:
        """Release a request that added ``tokens`` (where known); others are ignored (the replica may have left)."""
        if request_id in self._running:
            request, replica = self._running.pop(request_id)
            self.fleet.run(replica, -1, -request.tokens)
            self._call("released", request, replica, tokens)

    def replica(self, request_id: str) -> str:
        return self._running[request_id][1] if request_id in self._running else ""

    def plan(self, step: int, loads: Sequence[Load]) -> None:
        self._call("plan", step, loads)

    def reason(self, request_id: str) -> str:
        return self._call("reason", *self._running[request_id]) or "" if request_id in self._running else ""

    def watched(self) -> list[str]:
        return [name for name in self._call("watched") or () if name in self._running]

    def forget_prompts(self, keys: Sequence[str]) -> None:
        self._call("forget_prompts", keys)

    def moves(self, progress: Mapping[str, Progress]) -> list[Move]:
        """Return the policy's moves by the requests' progress; a moved request counts on its new replica at once."""
        moved = []
        try:
            for move in self.policy.moves(progress):
                if move.replica not in self.fleet or self.replica(move.id) in ("", move.replica):
                    continue
                request, _ = self._running[move.id]
                made, left, p90 = progress[move.id]
                self.release(move.id)
                prompt = request.prompt_tokens + made
                request = request._replace(prompt_tokens=prompt, response_tokens=left, p90_tokens=p90)
                self._count(request, move.replica)
                moved.append(move)
        except Exception as error:
            self._failed("moves", error)
        return moved

    def _count(self, request: Request, replica: str) -> None:
        self.fleet.run(replica, 1, request.tokens)
        self._running[request.id] = request, replica
        self._call("started", request, replica)

    def _choose(self, request: Request) -> str:
        try:
            return self.fleet.names[self.fleet.index[self.policy.choose(request)]]
        except Exception as error:
            self._failed("choose", error)
            return self._fallback.choose(request)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Return the policy's answer; ``None`` after an error, which is counted."""
        try:
            return getattr(self.policy, method)(*arguments)
        except Exception as error:
            self._failed(method, error)
            return None

    def _failed(self, method: str, error: Exception) -> None:
        self.errors += 1
        self.last_error = f"{method}: {type(error).__name__}: {error}"
