"""Simulated lengths: prompts of different length, responses around them, longer from visit to visit."""

from __future__ import annotations

import numpy as np


class World:
    """Log lengths: of a prompt normal with deviation ``between``, of its responses ``within`` (Student's t with
    ``tail`` degrees of freedom, scaled), all longer by ``drift`` a visit, each wandering by ``wander``."""

    def __init__(
        self,
        prompts: int,
        seed: int = 0,
        *,
        between: float = 0.6,
        within: float = 0.3,
        drift: float = 0.05,
        wander: float = 0.1,
        tail: float = 5,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.location = self.rng.normal(6, between, prompts)
        self._within, self._drift, self._wander, self._tail = within, drift, wander, tail

    def visit(self, samples: int) -> np.ndarray:
        """float64[prompts, samples], lengths of one visit; the next one is of a later policy."""
        shape = len(self.location), samples
        deviation = np.sqrt(self._tail / (self._tail - 2))
        noise = self._within * self.rng.standard_t(self._tail, shape) / deviation
        lengths = np.maximum(1, np.exp(self.location[:, None] + noise)).astype(np.int64)
        self.location = self.location + self._drift + self._wander * self.rng.standard_normal(len(self.location))
        return lengths
