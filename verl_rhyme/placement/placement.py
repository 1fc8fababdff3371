"""Accounts for what runs where, and asks a policy where to send what comes."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

from verl_rhyme.placement.fleet import REQUESTS, TOKENS, Fleet
from verl_rhyme.placement.histopipe import HistoPipe
from verl_rhyme.placement.least_loaded import LeastLoaded
from verl_rhyme.placement.longest_first import LongestFirst
from verl_rhyme.placement.makespan import Makespan
from verl_rhyme.placement.policy import Load, Move, PlacementPolicy, Progress, Request
from verl_rhyme.placement.skewness_aware import SkewnessAware
from verl_rhyme.placement.sticky_group import StickyGroup
from verl_rhyme.planning.cost import TYPICAL, ReplicaCost

POLICIES: dict[str, Callable[..., PlacementPolicy]] = {
    "least_loaded": LeastLoaded,
    "sticky_group": StickyGroup,
    "longest_first": LongestFirst,
    "histopipe": HistoPipe,
    "makespan": Makespan,
    "skewness_aware": SkewnessAware,
}


class NoReplica(RuntimeError):
    """There is no replica to send a request to."""


class Placement:
    """The events of a fleet, and the answer. A policy that fails costs balance or locality, never a request.

    Args:
        policy: A name in :data:`POLICIES`.
        options: Of the policy.
        conversations: How many conversations are remembered for their next turn; the longest unheard of go first.
        cost: What a replica's work costs, for those policies that reckon with it.

    Attributes:
        fleet: Replicas and loads.
        placed: Requests placed so far.
        misplaced: Of these, assigned to a replica that does not serve.
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
        conversations: int = 65536,
        cost: ReplicaCost = TYPICAL,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"no placement policy {policy!r}; there are {', '.join(sorted(POLICIES))}")
        self.fleet = Fleet(cost)
        self.policy = POLICIES[policy](self.fleet, **(options or {}))
        self.placed = self.misplaced = self.errors = 0
        self.last_error = ""
        self._conversations: OrderedDict[str, tuple[str, str]] = OrderedDict()  # id: key, replica
        self._remembered = conversations
        self._running: dict[str, list[tuple[Request, str]]] = {}
        self._random = random.Random(0)

    def add(self, replica: str, cost: ReplicaCost | None = None) -> None:
        """A replica takes requests from now on, with a cost of its own or that of all. One that is there already goes
        on as it is."""
        self.fleet.add(replica, cost)

    def remove(self, replica: str) -> bool:
        """A replica takes no more, and what ran there is forgotten; false when it was not there."""
        if replica not in self.fleet:
            return False
        for request_id in [name for name, runs in self._running.items() if any(at == replica for _, at in runs)]:
            while self.release(request_id, replica):
                pass
        self._tell("removed", replica)
        self.fleet.remove(replica)
        return True

    def report(self, replica: str, capacity: int) -> None:
        """KV tokens a replica has room for, at least 1. Ignored when it has left."""
        if replica in self.fleet:
            self.fleet.report(replica, capacity)

    def expect(self, requests: int, more: bool = False) -> None:
        """So many requests are about to come: bounds hold against the load there will be.

        Args:
            requests: How many.
            more: Than were announced and have not come yet; else these are forgotten, for some may never come.
        """
        self.fleet.expected = max(0, requests) + more * self.fleet.expected

    def acquire(self, request: Request) -> str:
        """Where to send a request, which counts there from now on until it is released.

        Raises:
            NoReplica: None was added, or all were removed.
        """
        if not self.fleet:
            raise NoReplica("No available servers in load balancer")
        if (known := self._conversations.get(request.id)) is not None:
            request = request._replace(key=known[0], last=known[1])
        serves = request.replica in self.fleet
        self.misplaced += bool(request.replica) and not serves
        replica = request.replica if serves else self._choose(request)
        self._place(request, replica)
        return replica

    def release(self, request_id: str, replica: str, tokens: int | None = None) -> bool:
        """A request ended; false when none of that name runs there (its replica may have left in between).

        Args:
            request_id: Its conversation.
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

    def place(self, requests: Sequence[Request]) -> list[str | None]:
        """Where to send these, as :meth:`acquire`, or ``None`` for one that is to wait: it is bound to no replica yet.
        Of a fleet without requests at least one does not wait.

        Raises:
            NoReplica: As :meth:`acquire`.
        """
        if not self.fleet:
            raise NoReplica("No available servers in load balancer")
        self._tell("coming", requests)
        replicas: list[str | None] = []
        for request in requests:
            replicas.append(replica := self._choose(request, waits=True))
            if replica is not None:
                self._place(request, replica)
        if requests and not self.fleet.totals[REQUESTS]:
            self._failed("choose lets all wait, though nothing runs")
            replicas[0] = first = self._choose(requests[0])
            self._place(requests[0], first)
        return replicas

    def due(self) -> bool:
        """Something that waits may find a place now."""
        return bool(self._ask(True, "due")) or not self.fleet.totals[REQUESTS]

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
                made, left, p90, ahead = progress[move.id]
                self.release(move.id, replica)
                request = request._replace(
                    prompt_tokens=request.prompt_tokens + made,
                    response_tokens=left,
                    p90_tokens=p90,
                    ahead=ahead,
                )
                self._settle(request, move.replica)
                moved.append(move)
        except Exception as error:
            self._failed(f"moves: {type(error).__name__}: {error}")
        return moved

    def forget(self) -> int:
        """Place what comes without regard to where its conversation and siblings are; how many were remembered."""
        count = len(self._conversations)
        self._conversations.clear()
        self._tell("forget")
        return count

    def status(self) -> dict[str, Any]:
        """Loads by replica, the greatest of them over its fair share, and what was counted."""
        fleet = self.fleet
        return {
            "requests": {name: int(n) for name, n in zip(fleet.names, fleet.running[REQUESTS], strict=True)},
            "tokens": {name: int(n) for name, n in zip(fleet.names, fleet.running[TOKENS], strict=True)},
            "request_imbalance": fleet.imbalance(REQUESTS),
            "token_imbalance": fleet.imbalance(TOKENS),
            "expected": fleet.expected,
            "placed": self.placed,
            "misplaced": self.misplaced,
            "policy_errors": self.errors,
            "last_policy_error": self.last_error,
        }

    def _place(self, request: Request, replica: str) -> None:
        self.placed += 1
        self.fleet.expected = max(0, self.fleet.expected - 1)
        self._settle(request, replica)

    def _settle(self, request: Request, replica: str) -> None:
        self.fleet.run(replica, 1, request.tokens)
        self._running.setdefault(request.id, []).append((request, replica))
        self._conversations[request.id] = (request.key, replica)
        self._conversations.move_to_end(request.id)
        if len(self._conversations) > self._remembered:
            self._conversations.popitem(last=False)
        self._tell("started", request, replica)

    @overload
    def _choose(self, request: Request) -> str: ...

    @overload
    def _choose(self, request: Request, waits: bool) -> str | None: ...

    def _choose(self, request: Request, waits: bool = False) -> str | None:
        try:
            replica = self.policy.choose(request)
            if (replica is None and waits) or (isinstance(replica, str) and replica in self.fleet):
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
