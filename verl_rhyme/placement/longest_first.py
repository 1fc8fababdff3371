"""Longest processing time first: a response goes to the replica with the fewest expected tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_rhyme.placement.fleet import Fleet
from verl_rhyme.placement.policy import Load, PlacementPolicy, Request, expected_tokens, roughly


class LongestFirst(PlacementPolicy):
    """Graham's LPT (SIAM J. Appl. Math. 1969), for requests in the order of falling length.

    :mod:`~verl_rhyme.scheduling.admission` makes that order. NeMo-RL's length-first scheduling does the same, by
    history or an oracle.

    Args:
        fleet: Loads of the replicas.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._tenth: dict[str, int] = {}  # by key, tenth of the prompts in the order by length

    def plan(self, step: int, loads: Sequence[Load]) -> None:
        tenth = np.empty(len(loads), np.int64)
        tenth[np.argsort(-expected_tokens(loads), kind="stable")] = 1 + np.arange(len(loads)) * 10 // max(1, len(loads))
        self._tenth.update(zip((load.key for load in loads), tenth.tolist(), strict=True))

    def left(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._tenth.pop(key, None)

    def reason(self, request: Request, replica: str) -> str:
        tokens, tenth = request.response_tokens, self._tenth.get(request.key)
        expected = "unknown length" if tokens is None else f"about {roughly(tokens)} tokens expected"
        ranked = "not in a plan" if tenth is None else f"prompt in tenth {tenth} of 10, longest first"
        return f"{expected}, {ranked}: replica with the fewest tokens"

    def choose(self, request: Request) -> str:
        return self._fleet.names[self._fleet.least_tokens()]
