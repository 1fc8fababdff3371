"""A length ranker of measured quality: what it tells of prompts never seen, so far off as one is that was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from verl_rhyme.simulation.workload import Prompt


class SimulatedRanker:
    """Of each prompt it expects its mean log length, with noise that leaves so much rank correlation.

    Log lengths and noise are taken for normal, where Spearman's correlation ``s`` is Pearson's ``2 sin(pi s / 6)``
    (Pearson 1907); and for calibrated, as :mod:`verl_rhyme.lengths.calibration` makes a ranker: what it knows little of
    it puts near the mean of all.

    Args:
        correlation: Rank correlation of its word with prompts' mean lengths (``rank_correlation`` of
            ``verl-rhyme ranker evaluate``), above 0, at most 1.
    """

    def __init__(self, correlation: float) -> None:
        self._share = 2 * math.sin(math.pi * correlation / 6)
        self._rng = np.random.default_rng(0)
        self._spread: tuple[float, float] | None = None
        self._told: set[str] = set()

    def expects(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Log lengths of those that come for the first time, by key; mean and spread are those of the first call's."""
        new = [prompt for prompt in {prompt.key: prompt for prompt in prompts}.values() if prompt.key not in self._told]
        if not new:
            return {}
        self._told |= {prompt.key for prompt in new}
        locations = np.array([np.log(prompt.lengths).mean() for prompt in new])
        if self._spread is None:
            self._spread = float(locations.mean()), float(locations.std())
        mean, spread = self._spread
        noise = math.sqrt(max(0.0, 1 - self._share**2)) * spread * self._rng.standard_normal(len(new))
        words = mean + self._share * (self._share * (locations - mean) + noise)
        return dict(zip((prompt.key for prompt in new), words.tolist(), strict=True))
