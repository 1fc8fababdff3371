"""What a placement policy is told and what it answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from verl_rhyme.planning.cost import Floats


class Request(NamedTuple):
    """What is known of a request when it asks for a replica; all but the id may be missing.

    Attributes:
        id: Its sample: later attempts come under the same id.
        key: The prompt it belongs to.
        prompt_tokens: Tokens it begins with.
        response_tokens: Tokens it will add, as predicted or known; ``None`` when neither.
        p90_tokens: 90th percentile of the tokens it will add; ``None`` without a prediction.
        replica: Where it runs already; empty: the policy is asked.
    """

    id: str
    key: str = ""
    prompt_tokens: int = 0
    response_tokens: int | None = None
    p90_tokens: int | None = None
    replica: str = ""

    @property
    def tokens(self) -> int:
        """KV tokens it will fill at its end; 0 when nobody knows."""
        return 0 if self.response_tokens is None else max(0, self.prompt_tokens + self.response_tokens)


class Load(NamedTuple):
    """A prompt that is about to be answered.

    Attributes:
        key: As its requests will have it (:attr:`Request.key`).
        samples: Responses that are wanted.
        tokens: Expected of each of them; ``None`` when nobody knows.
        prompt_tokens: Of the prompt; 0 when nobody knows.
    """

    key: str
    samples: int
    tokens: float | None = None
    prompt_tokens: int = 0


def expected_tokens(loads: Sequence[Load]) -> Floats:
    """float64[loads], tokens of a response of each; where nobody knows, the mean of the others."""
    known = [load.tokens for load in loads if load.tokens is not None]
    mean = float(np.mean(known)) if known else 1.0
    return np.array([mean if load.tokens is None else load.tokens for load in loads])


def roughly(tokens: float) -> str:
    """Rounded to one digit, so that reasons can be told alike and counted: 3,000."""
    whole = max(1, int(tokens))
    digit = 10 ** (len(str(whole)) - 1)
    return f"{(2 * whole + digit) // (2 * digit) * digit:,}"


class Progress(NamedTuple):
    """How far a running request is.

    Attributes:
        made: Tokens that it has made since it was placed.
        left: That it is expected to add to these; ``None`` when nobody knows.
        p90_left: 90th percentile of that.
    """

    made: int
    left: int | None = None
    p90_left: int | None = None


class Move(NamedTuple):
    """A running request that is to go on elsewhere.

    Attributes:
        id: Of its conversation.
        replica: Where to.
        reason: In a few words.
    """

    id: str
    replica: str
    reason: str


class PlacementPolicy:
    """Answers where, over a :class:`~verl_rhyme.placement.fleet.Fleet` that others keep up to date.

    May raise in any method: :class:`~verl_rhyme.placement.placement.Placement` then takes the least loaded.
    All but :meth:`choose` may be left as they are.
    """

    def choose(self, request: Request) -> str:
        """The replica for a request; changes nothing. The fleet has at least one."""
        raise NotImplementedError

    def reason(self, request: Request, replica: str) -> str:
        """Why it was chosen, in a few words; empty where the policy's name says all."""
        return ""

    def plan(self, step: int, loads: Sequence[Load]) -> None:
        """These prompts will be answered, for the update ``step``; their requests come later, or have come."""

    def started(self, request: Request, replica: str) -> None:
        """It was sent there, on this policy's word or not; the fleet counts it already."""

    def released(self, request: Request, replica: str, tokens: int | None) -> None:
        """It came to its end, having added ``tokens`` there; or, where these are ``None``, it left otherwise: it was
        cut short or lost, is moved, or its replica is about to leave. The fleet no longer counts it."""

    def left(self, keys: Sequence[str]) -> None:
        """These prompts of earlier plans are not answered any more; nothing of them runs."""

    def watched(self) -> Sequence[str]:
        """Ids of running requests that may be better off elsewhere: it is to be told how far they are."""
        return ()

    def moves(self, progress: Mapping[str, Progress]) -> Iterable[Move]:
        """What is to go on elsewhere; each is carried out before the next is asked for."""
        return ()
