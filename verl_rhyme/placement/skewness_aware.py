"""Skewness-aware dispatch (StreamRL, arXiv:2504.15930, section 5, Algorithm 2): separate replicas for the longest
prompts.

The prompts of a training step are ranked by expected length. The longest get a separate pool of replicas, whose size
minimizes the sum of both pools' seconds; all sizes are tried. A replica with M samples that decodes BS at a time needs
``PTL(BS) L ceil(M / BS)`` seconds. PTL is the time of a decode step with that many rows. L is the 90% quantile of the
tail's lengths, or the median of the others' lengths. BS is what slots and cache hold, or M if that is fewer.

Within a replica the longest start first (:mod:`~verl_rhyme.scheduling.admission`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verl_rhyme.placement.fleet import Fleet, Pool
from verl_rhyme.placement.policy import Load, PlacementPolicy, expected_tokens
from verl_rhyme.planning.cost import Floats

#: Quantiles that represent the lengths of the tail and of the other prompts.
_QUANTILES = (0.9, 0.5)


class SkewnessAware(PlacementPolicy):
    """Skewness-aware dispatch; see the module. ``tail`` is the share of the prompts in the first pool.

    Replicas count as equal: with the fleet's cost and the smallest cache of any.
    """

    def __init__(self, fleet: Fleet, tail: float = 0.2) -> None:
        if not 0 < tail < 1:
            raise ValueError(f"skewness_aware: placement.options.tail={tail} must be above 0 and below 1")
        super().__init__(fleet)
        self._tail = tail
        self._pools: dict[str, Pool] = {}  # by prompt

    def pool(self, key: str) -> Pool | None:
        return self._pools.get(key)

    def plan(self, step: int, loads: Sequence[Load]) -> None:
        names = self._fleet.names
        if len(loads) < 2 or len(names) < 2:
            return
        tokens = np.maximum(expected_tokens(loads), 1.0)
        order = np.argsort(-tokens, kind="stable")
        parts = np.split(order, [min(max(1, int(self._tail * len(loads))), len(loads) - 1)])
        tail, rest = (
            self._seconds([loads[i] for i in part], tokens[part], share)
            for part, share in zip(parts, _QUANTILES, strict=True)
        )
        both = np.stack([np.maximum(tail, rest[::-1]), tail + rest[::-1]])  # with 1, 2, ... replicas for the tail
        width = 1 + int(np.lexsort(both)[0])  # among equal sums, the fastest slower pool
        for rank, (part, own) in enumerate(zip(parts, (names[:width], names[width:]), strict=True), 1):
            pool = Pool(f"pool {rank} of 2 in step {step}", own)
            self._pools.update((loads[i].key, pool) for i in part.tolist())

    def forget_prompts(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._pools.pop(key, None)

    def _seconds(self, loads: Sequence[Load], tokens: Floats, share: float) -> Floats:
        """Return float64[R - 1], seconds of a pool on 1, 2, ... replicas."""
        cost, room = self._fleet.cost, float(self._fleet.capacity.min())
        number = np.array([load.samples for load in loads], np.float64)
        begin = np.array([load.prompt_tokens for load in loads], np.float64)
        done = np.cumsum(number)
        at = np.searchsorted(done, (1 - share) * done[-1], side="right")
        length = tokens[min(int(at), len(tokens) - 1)]
        context = (number * tokens * (begin + tokens / 2)).sum() / (number * tokens).sum()
        most = max(1.0, min(cost.slots, np.floor(room / context)))
        samples = np.ceil(done[-1] / np.arange(1, len(self._fleet)))
        rows = np.minimum(samples, most)
        step = cost.step.weights(rows) + (cost.step.row + cost.step.cached * context) * rows
        return step * length * np.ceil(samples / rows)
