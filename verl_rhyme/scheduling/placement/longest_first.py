"""Longest processing time first: a response goes where the fewest tokens are expected."""

from __future__ import annotations

from verl_rhyme.scheduling.placement.fleet import Fleet
from verl_rhyme.scheduling.placement.policy import PlacementPolicy, Request


class LongestFirst(PlacementPolicy):
    """Graham's LPT (SIAM J. Appl. Math. 1969), for requests that come in the order of falling length
    (``Rules.start_order``); NeMo-RL's length-first scheduling does the same by history, a probe or an oracle.

    Args:
        fleet: Where the loads stand.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def choose(self, request: Request) -> str:
        return self._fleet.names[self._fleet.least_tokens()]
