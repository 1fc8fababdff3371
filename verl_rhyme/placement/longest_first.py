"""Longest processing time first: a response goes to the replica with the fewest expected tokens."""

from __future__ import annotations

from verl_rhyme.placement.fleet import Fleet
from verl_rhyme.placement.policy import PlacementPolicy, Request, roughly


class LongestFirst(PlacementPolicy):
    """Graham's LPT (SIAM J. Appl. Math. 1969), for requests in the order of falling length.

    :mod:`~verl_rhyme.scheduling.admission` makes that order. NeMo-RL's length-first scheduling does the same, by
    history or an oracle.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def choose(self, request: Request) -> str:
        return self._fleet.names[self._fleet.least_tokens()]

    def reason(self, request: Request, replica: str) -> str:
        tokens = request.response_tokens
        expected = "unknown length" if tokens is None else f"about {roughly(tokens)} tokens expected"
        return f"{expected}: replica with the fewest tokens"
