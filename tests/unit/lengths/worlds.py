"""Simulated lengths of responses, and prompts that determine them."""

from __future__ import annotations

import numpy as np

from verl_rhyme.lengths.pairs import Pairs

#: Number of token ids of :func:`pairs`.
VOCABULARY = 24
#: Shape of a ranker that trains in a second.
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def pairs(prompts: int, samples: int = 4, seed: int = 0) -> Pairs:
    """Prompts of a dozen tokens; each 3 in one makes responses longer by half, on average."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(prompts):
        prompt = rng.integers(4, VOCABULARY, rng.integers(11, 14))
        prompt[rng.random(len(prompt)) < rng.random() * 0.5] = 3
        location = 3 + 0.4 * (prompt == 3).sum()
        rows.append((prompt, np.exp(location + 0.2 * rng.standard_normal(samples)).astype(int)))
    return Pairs.from_rows(rows)


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
