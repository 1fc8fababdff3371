"""Accounts for what runs where, and asks a policy where to send what comes."""

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
    """There is no replica to send a request to."""


class Placement:
    """The events of a fleet, and the answer. A policy that fails costs balance, never a request.

    Args:
        policy: A name in :data:`POLICIES`.
        options: Of the policy.
        cost: What a replica's work costs, for those policies that reckon with it.

    Attributes:
        fleet: Replicas and loads.
        errors: Calls of the policy that raised.
        last_error: The latest of them, in words.

    Raises:
        ValueError: No such policy.
        TypeError: No such option.
    """

    def __init__(
        self,
        policy: str = "least_loaded",
        options: dict[str, Any] | None = None,
        cost: ReplicaCost = TYPICAL,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"no placement policy {policy!r}; there are {', '.join(sorted(POLICIES))}")
        self.fleet = Fleet(cost)
        self.policy = POLICIES[policy](self.fleet, **(options or {}))
        self.errors = 0
        self.last_error = ""
        self._running: dict[str, list[tuple[Request, str]]] = {}
        self._random = random.Random(0)

    def add(self, replica: str) -> None:
        """A replica takes requests from now on. One that is there already goes on as it is."""
        self.fleet.add(replica)

    def remove(self, replica: str) -> bool:
        """A replica takes no more, and what ran there is forgotten; false when it was not there."""
        if replica not in self.fleet:
            return False
        for request_id in [name for name, runs in self._running.items() if any(at == replica for _, at in runs)]:
            while self.release(request_id, replica):
                pass
        self.fleet.remove(replica)
        return True

    def report(self, replica: str, capacity: int) -> None:
        """KV tokens a replica has room for. Ignored when it has left.

        Raises:
            ValueError: Not positive.
        """
        if replica in self.fleet:
            self.fleet.report(replica, capacity)

    def acquire(self, request: Request) -> str:
        """Where to send a request, which counts there from now on until it is released.

        Raises:
            NoReplica: None was added, or all were removed.
        """
        if not self.fleet:
            raise NoReplica("No available servers in load balancer")
        replica = request.replica if request.replica in self.fleet else self._choose(request)
        self._settle(request, replica)
        return replica

    def release(self, request_id: str, replica: str, tokens: int | None = None) -> bool:
        """A request ended; false when none of that name runs there (its replica may have left in between).

        Args:
            request_id: Its id.
            replica: Where it ran.
            tokens: That it added there; ``None`` where nobody said.
        """
        runs = self._running.get(request_id, [])
        for i, (request, at) in enumerate(runs):
            if at == replica:
                del runs[i]
                if not runs:
                    del self._running[request_id]
                self.fleet.run(replica, -1, -request.tokens)
                self._tell("released", request, replica, tokens)
                return True
        return False

    def plan(self, step: int, loads: Sequence[Load]) -> None:
        """These prompts will be answered for the update ``step``."""
        if self.fleet:
            self._tell("plan", step, loads)

    def reason(self, request_id: str) -> str:
        """Why a running request is where it is; empty when it is not known here."""
        for request, replica in self._running.get(request_id, []):
            return str(self._ask("", "reason", request, replica))
        return ""

    def watched(self) -> list[str]:
        """Ids of running requests whose progress :meth:`moves` wants to know."""
        return [name for name in self._ask((), "watched") if name in self._running]

    def left(self, keys: Sequence[str]) -> None:
        """These prompts of earlier plans are not answered any more."""
        self._tell("left", keys)

    def moves(self, progress: Mapping[str, Progress]) -> list[Move]:
        """Running requests that are to go on elsewhere, which count there from now on, with what they have.

        Args:
            progress: By id.
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
        self._tell("started", request, replica)

    def _choose(self, request: Request) -> str:
        try:
            replica = self.policy.choose(request)
            if isinstance(replica, str) and replica in self.fleet:
                return replica
            self._failed(f"choose answered {replica!r}, which is no replica")
        except Exception as error:
            self._failed(f"choose: {type(error).__name__}: {error}")
        least = self.fleet.least()
        return self.fleet.names[least[self._random.randrange(len(least))]]

    def _tell(self, event: str, *about: Any) -> None:
        self._ask(None, event, *about)

    def _ask(self, otherwise: Any, event: str, *about: Any) -> Any:
        try:
            return getattr(self.policy, event)(*about)
        except Exception as error:
            self._failed(f"{event}: {type(error).__name__}: {error}")
            return otherwise

    def _failed(self, why: str) -> None:
        self.errors += 1
        self.last_error = why
