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
#: Quantiles that represent a distribution of lengths.
_QUANTILES = 4096


class Prompt(NamedTuple):
    """A visit of a prompt in an epoch."""

    key: str  # the same in every epoch
    epoch: int  # from 0
    tokens: int  # of the prompt
    lengths: Ints  # int64[samples], response tokens


@dataclass(frozen=True)
class Lengths:
    """Long-tailed distribution of response lengths with given percentiles, correlated within a prompt.

    A response's quantile is a normal draw, the sum of a prompt's draw, shared by its samples, and the sample's own (a
    Gaussian copula). Between the percentiles the logarithm of the length is linear in the normal quantile. Below the
    first and above the last one the nearest slope continues, up to the limit.
    """

    percentiles: Mapping[float, float]  # tokens by percentile, at least two: {50: 2000, 90: 7000, 99: 16000}
    limit: int  # most tokens of a response
    alike: float = 0.6  # share of the variance (of log length) between prompts
    wander: float = 0.2  # change of a prompt's draw between two epochs, as a share of the spread between prompts

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
        if self.limit < 1:
            raise ValueError(f"limit must be at least 1, not {self.limit}")

    def at(self, place: npt.NDArray[np.float64]) -> Ints:
        """Return the tokens at quantiles of the standard normal distribution."""
        points = sorted(self.percentiles.items())
        places = ndtri(np.array([p for p, _ in points]) / 100)
        logs = np.log([tokens for _, tokens in points])
        low, high = (np.diff(logs)[i] / np.diff(places)[i] for i in (0, -1))
        log = np.interp(place, places, logs)
        log += low * np.minimum(place - places[0], 0) + high * np.maximum(place - places[-1], 0)
        return np.clip(np.exp(log), 1, self.limit).astype(np.int64)

    def typical(self) -> npt.NDArray[np.float64]:
        """Return tokens at equidistant quantiles, float64[4096]."""
        return self.at(ndtri((np.arange(_QUANTILES) + 0.5) / _QUANTILES)).astype(float)

    def epochs(self, prompts: int, samples: int, epochs: int, prompt_tokens: int, seed: int = 0) -> Iterator[Prompt]:
        """Yield the prompts of a dataset's epochs, each in random order."""
        rng = np.random.default_rng(seed)
        own = rng.standard_normal(prompts)
        for epoch in range(epochs):
            if epoch:
                own = np.sqrt(1 - self.wander**2) * own + self.wander * rng.standard_normal(prompts)
            each = rng.standard_normal((prompts, samples))
            lengths = self.at(np.sqrt(self.alike) * own[:, None] + np.sqrt(1 - self.alike) * each)
            for i in rng.permutation(prompts).tolist():
                yield Prompt(str(i), epoch, prompt_tokens, lengths[i])
