"""Input and output of placement policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

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


def roughly(tokens: float) -> str:
    """Return the tokens rounded to one digit (3,000), so that equal reasons can be counted."""
    whole = max(1, int(tokens))
    digit = 10 ** (len(str(whole)) - 1)
    return f"{(2 * whole + digit) // (2 * digit) * digit:,}"


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
    """Base class of policies that choose replicas, over a :class:`~verl_rhyme.placement.fleet.Fleet` that the caller
    updates.

    Any method may raise: :class:`~verl_rhyme.placement.placement.Placement` then takes the least loaded replica. Only
    :meth:`choose` must be implemented.
    """

    def choose(self, request: Request) -> str:
        """Return the replica for a request, without side effects; the fleet has at least one."""
        raise NotImplementedError

    def reason(self, request: Request, replica: str) -> str:
        """Return the reason for a choice in a few words; empty where the policy's name is enough."""
        return ""

    def plan(self, step: int, loads: Sequence[Load]) -> None:
        """Plan the prompts of training step ``step``; their requests come later, or have come."""

    def started(self, request: Request, replica: str) -> None:
        """Record that a request runs on a replica; the fleet counts it already."""

    def released(self, request: Request, replica: str, tokens: int | None) -> None:
        """A request left a replica, and the fleet no longer counts it: it added ``tokens`` there, or with ``None`` was
        interrupted, lost or moved, or its replica leaves.
        """

    def forget_prompts(self, keys: Sequence[str]) -> None:
        """Forget planned prompts; none of their requests runs."""

    def watched(self) -> Sequence[str]:
        """Return ids of running requests whose progress :meth:`moves` needs."""
        return ()

    def moves(self, progress: Mapping[str, Progress]) -> Iterable[Move]:
        """Yield moves of running requests; the caller carries out each before it takes the next."""
        return ()
