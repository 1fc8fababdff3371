"""verl's own rule, for the simulator: a request goes where fewest run."""

from __future__ import annotations

import random

from verl_rhyme.placement.fleet import Fleet
from verl_rhyme.placement.policy import PlacementPolicy, Request


class LeastLoaded(PlacementPolicy):
    """The reference (``verl.workers.rollout.router.GlobalRequestLoadBalancer``); ties are drawn, as there.

    Args:
        fleet: Where the loads stand.
        seed: Of the draws; ``None`` for another one each time.
    """

    def __init__(self, fleet: Fleet, seed: int | None = None) -> None:
        self._fleet = fleet
        self._random = random.Random(seed)

    def choose(self, request: Request) -> str:
        least = self._fleet.least()
        return self._fleet.names[least[self._random.randrange(len(least))]]
