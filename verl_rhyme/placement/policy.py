"""Input, output and base class of placement policies, and the policies without a plan."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from verl_rhyme.placement.fleet import Fleet, Pool
from verl_rhyme.planning.cost import Floats


class Request(NamedTuple):
    """A request that needs a replica; all fields but the id may be missing."""

    id: str  # of its sample, the same for later attempts
    key: str = ""  # of its prompt
    prompt_tokens: int = 0  # tokens at its start
    response_tokens: int | None = None  # it will add, predicted or known; None where unknown
    p90_tokens: int | None = None  # 90th percentile of these; None without a forecast
    replica: str = ""  # on which it already runs; empty: the policy chooses

    @property
    def tokens(self) -> int:
        """KV tokens at its end; 0 where unknown."""
        return 0 if self.response_tokens is None else max(0, self.prompt_tokens + self.response_tokens)


class Load(NamedTuple):
    """A prompt whose responses will be generated."""

    key: str  # Request.key
    samples: int  # number of responses
    tokens: float | None = None  # expected ones of each response; None where unknown
    prompt_tokens: int = 0  # 0 where unknown


def expected_tokens(loads: Sequence[Load]) -> Floats:
    """Return float64[loads], expected response tokens; unknown ones are the mean of the others."""
    known = [load.tokens for load in loads if load.tokens is not None]
    mean = float(np.mean(known)) if known else 1.0
    return np.array([mean if load.tokens is None else load.tokens for load in loads])


class Progress(NamedTuple):
    """Progress of a running request."""

    made: int  # tokens since it was placed
    left: int | None = None  # expected further tokens; None where unknown
    p90_left: int | None = None  # their 90th percentile


class Move(NamedTuple):
    """A move of a running request to another replica."""

    id: Any  # of the request; in the moves of a rollout, its attempt
    replica: str
    reason: str


class PlacementPolicy:
    """Base class: a request goes to the replica with the fewest expected tokens, in its prompt's pool if it has one.

    The caller updates the fleet. Any method may raise.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def pool(self, key: str) -> Pool | None:
        """Return the replicas planned for a prompt; ``None``: all."""
        return None

    def choose(self, request: Request) -> str:
        """Return the replica for a request, without side effects; the fleet has at least one."""
        return self._fleet.least_tokens(self.pool(request.key))

    def reason(self, request: Request, replica: str) -> str:
        pool = self.pool(request.key)
        if pool is None or replica not in pool.names:
            return "replica with the fewest tokens"
        return f"{pool.name}, on {len(pool.names)} replicas"

    def plan(self, step: int, loads: Sequence[Load]) -> None:
        """Plan the prompts of training step ``step``; their requests come later, or have come."""

    def started(self, request: Request, replica: str) -> None:
        """A request runs on a replica; the fleet counts it already."""

    def released(self, request: Request, replica: str, tokens: int | None) -> None:
        """A request left a replica, with ``tokens`` generated there; ``None``: interrupted, lost or moved."""

    def forget_prompts(self, keys: Sequence[str]) -> None:
        """Forget planned prompts; none of their requests runs."""

    def watched(self) -> Sequence[str]:
        """Return ids of running requests whose progress :meth:`moves` needs."""
        return ()

    def moves(self, progress: Mapping[str, Progress]) -> Iterable[Move]:
        """Yield moves of running requests; the caller carries out each before it takes the next."""
        return ()


class LongestFirst(PlacementPolicy):
    """Graham's longest processing time first (SIAM J. Appl. Math. 1969), with admission in the order of falling length.

    NeMo-RL's length-first scheduling does the same, by history or an oracle.
    """


class LeastLoaded(PlacementPolicy):
    """The replica with the fewest requests, at random among equals, as verl's ``GlobalRequestLoadBalancer``."""

    def __init__(self, fleet: Fleet, seed: int | None = None) -> None:
        super().__init__(fleet)
        self._random = random.Random(seed)

    def choose(self, request: Request) -> str:
        requests = self._fleet.requests
        least = (requests == requests.min()).nonzero()[0]
        return self._fleet.names[least[self._random.randrange(len(least))]]

    def reason(self, request: Request, replica: str) -> str:
        return ""
