"""Two pools: the longest responses on replicas of their own, with few beside them (StreamRL, arXiv:2504.15930,
section 4, skewness-aware dispatching, within a synchronous step)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from verl_rhyme.scheduling.placement.fleet import Fleet
from verl_rhyme.scheduling.placement.policy import Load, PlacementPolicy, Request, expected_tokens


class _Pools(NamedTuple):
    """Of a step: replicas of the tail, which are the first ones, and the tokens from which a prompt belongs to it."""

    step: int
    width: int
    tokens: float


class TwoPools(PlacementPolicy):
    """See the module. How many replicas the tail has is found by trying all: the slower pool's seconds are least.

    Args:
        fleet: Where the loads stand.
        tail: Share of a step's prompts, the longest, that are the tail.

    Raises:
        ValueError: A share that is none.
    """

    def __init__(self, fleet: Fleet, tail: float = 0.2) -> None:
        if not 0 < tail < 1:
            raise ValueError(f"two_pools: tail={tail} must be above 0 and below 1")
        self._fleet, self._tail = fleet, tail
        self._pool: dict[str, tuple[bool, _Pools]] = {}  # by key: whether of the tail

    def plan(self, step: int, loads: Sequence[Load]) -> None:
        fleet = self._fleet
        if len(fleet) < 2 or len(loads) < 2:
            return
        tokens = expected_tokens(loads)
        samples = np.array([load.samples for load in loads])
        held = samples * tokens * (np.array([load.prompt_tokens for load in loads]) + tokens / 2)
        order = np.argsort(-tokens, kind="stable")
        count = max(1, int(self._tail * len(loads)))
        workers, room = np.arange(1, len(fleet)), float(fleet.capacity.min())
        seconds = [
            fleet.cost.together(
                tokens[pool].max(), (samples * tokens)[pool].sum() / width, held[pool].sum() / width, room
            )
            for pool, width in ((order[:count], workers), (order[count:], len(fleet) - workers))
        ]
        width = int(workers[int(np.argmin(np.maximum(*seconds)))])
        long, pools = set(order[:count].tolist()), _Pools(step, width, float(tokens[order[count - 1]]))
        self._pool.update((load.key, (i in long, pools)) for i, load in enumerate(loads))

    def left(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._pool.pop(key, None)

    def choose(self, request: Request) -> str:
        fleet = self._fleet
        at = np.arange(len(fleet))
        long, pools = self._pool.get(request.key, (False, None))
        if pools is not None and pools.width < len(fleet):
            at = at[: pools.width] if long else at[pools.width :]
        return fleet.names[fleet.least_tokens(at)]

    def why(self, request: Request, replica: str) -> str:
        long, pools = self._pool.get(request.key, (False, None))
        if pools is None:
            return "in no plan: where the fewest tokens were"
        count = pools.width if long else len(self._fleet) - pools.width
        if not 0 < count < len(self._fleet):
            return "its pool's replicas are gone: where the fewest tokens were"
        pool = "the tail of step {}, {:,.0f} tokens or more" if long else "the rest of step {}, at most {:,.0f} tokens"
        return f"{pool.format(pools.step, pools.tokens)} expected: {count} of {len(self._fleet)} replicas"
