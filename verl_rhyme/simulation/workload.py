"""Workload of a simulation: prompts, epoch by epoch, and the length of each response."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

Ints = npt.NDArray[np.int64]


class Prompt(NamedTuple):
    """A visit of a prompt in an epoch.

    Attributes:
        key: Id of the prompt, the same in every epoch.
        epoch: Number of the epoch, from 0.
        tokens: Tokens of the prompt.
        lengths: int64[samples], response tokens of each sample.
    """

    key: str
    epoch: int
    tokens: int
    lengths: Ints


@dataclass(frozen=True)
class Lengths:
    """Long-tailed distribution of response lengths with given percentiles, correlated within a prompt.

    A response's quantile is a normal draw, the sum of a prompt's draw, shared by its samples, and the sample's own (a
    Gaussian copula). Between the percentiles the logarithm of the length is linear in the normal quantile. Below the
    first and above the last one the nearest slope continues, up to the limit.

    Args:
        percentiles: Tokens by percentile, at least two: ``{50: 2000, 90: 7000, 99: 16000}``.
        limit: Maximum tokens of a response.
        alike: Share of the variance (of log length) between prompts.
        growth: Factor of all lengths from one epoch to the next: 1.05 is 5% growth.
        wander: Change of a prompt's draw from one epoch to the next, as a share of the spread between prompts.

    Raises:
        ValueError: Percentiles do not rise, or a share is not from 0 to 1.
    """

    percentiles: Mapping[float, float]
    limit: int
    alike: float = 0.6
    growth: float = 1.0
    wander: float = 0.2

    def __post_init__(self) -> None:
        points = sorted(self.percentiles.items())
        rising = all(a[1] < b[1] for a, b in itertools.pairwise(points))
        if len(points) < 2 or not rising or not all(0 < p < 100 and 0 < tokens < math.inf for p, tokens in points):
            raise ValueError(
                "percentiles must be two or more keys between 0 and 100 with rising tokens, not "
                f"{dict(self.percentiles)}"
            )
        for name in ("alike", "wander"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {getattr(self, name)}")
        if self.limit < 1 or not 0 < self.growth < math.inf:
            raise ValueError(f"limit must be at least 1 and growth above 0, not {self.limit} and {self.growth}")

    def at(self, place: npt.NDArray[np.float64]) -> Ints:
        """Return the tokens at quantiles of the standard normal distribution."""
        points = sorted(self.percentiles.items())
        places = ndtri(np.array([p for p, _ in points]) / 100)
        logs = np.log([tokens for _, tokens in points])
        low, high = (np.diff(logs)[i] / np.diff(places)[i] for i in (0, -1))
        log = np.interp(place, places, logs)
        log += low * np.minimum(place - places[0], 0) + high * np.maximum(place - places[-1], 0)
        return np.clip(np.exp(log), 1, self.limit).astype(np.int64)

    def epochs(
        self, prompts: int, samples: int, epochs: int, prompt_tokens: int, seed: int = 0, unseen: float = 0.0
    ) -> Iterator[Prompt]:
        """Yield the prompts of a dataset's epochs, each epoch in random order.

        Args:
            prompts: Prompts of an epoch.
            samples: Samples of each prompt.
            epochs: Number of epochs.
            prompt_tokens: Tokens of each prompt.
            seed: Seed of all draws.
            unseen: Share of prompts that are new in each epoch.
        """
        rng = np.random.default_rng(seed)
        own = rng.standard_normal(prompts)
        names = np.arange(prompts)
        fresh = prompts
        for epoch in range(epochs):
            if epoch:
                own = np.sqrt(1 - self.wander**2) * own + self.wander * rng.standard_normal(prompts)
                others = np.flatnonzero(rng.random(prompts) < unseen)
                own[others] = rng.standard_normal(len(others))
                names[others] = np.arange(fresh, fresh + len(others))
                fresh += len(others)
            each = rng.standard_normal((prompts, samples))
            lengths = self.at(np.sqrt(self.alike) * own[:, None] + np.sqrt(1 - self.alike) * each)
            lengths = np.clip(lengths * self.growth**epoch, 1, self.limit).astype(np.int64)
            for i in rng.permutation(prompts).tolist():
                yield Prompt(str(names[i]), epoch, prompt_tokens, lengths[i])
