"""verl's rule, for the simulator: a request goes to the replica with the fewest requests."""

from __future__ import annotations

import random

from verl_rhyme.placement.fleet import Fleet
from verl_rhyme.placement.policy import PlacementPolicy, Request


class LeastLoaded(PlacementPolicy):
    """The least loaded replica (``verl.workers.rollout.router.GlobalRequestLoadBalancer``); random ties, as in verl."""

    def __init__(self, fleet: Fleet, seed: int | None = None) -> None:
        self._fleet = fleet
        self._random = random.Random(seed)

    def choose(self, request: Request) -> str:
        requests = self._fleet.requests
        least = (requests == requests.min()).nonzero()[0]
        return self._fleet.names[least[self._random.randrange(len(least))]]
