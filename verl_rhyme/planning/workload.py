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


class Turn(NamedTuple):
    """A turn of a sample, and the call of a tool after it, unless it is the last."""

    tokens: int  # of the policy
    tool_tokens: int = 0  # of the tool's answer
    tool_s: float = 0.0


class Prompt(NamedTuple):
    """A visit of a prompt in an epoch."""

    key: str  # the same in every epoch
    epoch: int  # from 0
    tokens: int  # of the prompt
    lengths: Ints  # int64[samples], response tokens of the policy
    turns: tuple[tuple[Turn, ...], ...] = ()  # by sample; empty: one turn each

    def turns_of(self, number: int) -> tuple[Turn, ...]:
        return self.turns[number] if self.turns else (Turn(int(self.lengths[number])),)


@dataclass(frozen=True)
class Turns:
    """Turns of a sample and its tool calls; ``mean=1``: one turn.

    The logarithm of the number of turns is normal, correlated within a prompt like lengths. Tool seconds are
    log-normal, and independent.
    """

    mean: float = 1.0  # turns of the median sample
    spread: float = 0.35  # standard deviation of the logarithm of their number
    tool_seconds: tuple[float, float] = (0.0, 0.0)  # median and 99th percentile
    tool_tokens: int = 0  # of an answer
    most: int = 64  # turns (verl's max_assistant_turns)

    def __post_init__(self) -> None:
        median, p99 = self.tool_seconds
        if not (self.mean >= 1 and self.spread >= 0 and 0 <= median <= p99 < math.inf and self.tool_tokens >= 0):
            raise ValueError(
                "turns must be at least 1, turns_spread and tool_tokens at least 0, and tool_seconds a median and a "
                f"99th percentile that is not below it, not {self}"
            )

    def numbers(self, place: npt.NDArray[np.float64]) -> Ints:
        """Return the turns at quantiles of the standard normal distribution."""
        return np.clip(np.rint(self.mean * np.exp(self.spread * place)), 1, self.most).astype(np.int64)

    def seconds(self, rng: np.random.Generator, calls: int) -> npt.NDArray[np.float64]:
        median, p99 = self.tool_seconds
        sigma = math.log(p99 / median) / float(ndtri(0.99)) if median else 0.0
        return median * np.exp(sigma * rng.standard_normal(calls))


@dataclass(frozen=True)
class Lengths:
    """Long-tailed distribution of the lengths of responses, or of their turns, correlated within a prompt.

    A response's quantile is a normal draw, the sum of a prompt's draw, shared by its samples, and the sample's own (a
    Gaussian copula). Between the percentiles the logarithm of the length is linear in the normal quantile. Below the
    first and above the last one the nearest slope continues, up to the limit. With several turns the percentiles are
    of a turn; a sample's number of turns is correlated like a length, its turns are not.
    """

    percentiles: Mapping[float, float]  # tokens by percentile, at least two: {50: 2000, 90: 7000, 99: 16000}
    limit: int  # most tokens of a response
    alike: float = 0.6  # share of the variance (of log length) between prompts
    wander: float = 0.2  # change of a prompt's draw between two epochs, as a share of the spread between prompts
    turns: Turns = Turns()

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
            place = np.sqrt(self.alike) * own[:, None] + np.sqrt(1 - self.alike) * each
            lengths, turns = self.at(place), list[tuple[tuple[Turn, ...], ...]]([()] * prompts)
            if self.turns.mean > 1:
                turns = [tuple(self._cut(rng, number) for number in row) for row in self.turns.numbers(place)]
                lengths = np.array([[sum(turn.tokens for turn in sample) for sample in row] for row in turns])
            for i in rng.permutation(prompts).tolist():
                yield Prompt(str(i), epoch, prompt_tokens, lengths[i], turns[i])

    def _cut(self, rng: np.random.Generator, number: int) -> tuple[Turn, ...]:
        """Return the turns of a sample, of which those after the limit are missing."""
        tokens, seconds = self.at(rng.standard_normal(number)), self.turns.seconds(rng, number)
        found, left = list[Turn](), self.limit
        for each, tool_s in zip(tokens.tolist(), seconds.tolist(), strict=True):
            found.append(Turn(min(each, left), self.turns.tool_tokens, tool_s))
            left -= each + self.turns.tool_tokens
            if left <= 0:
                break
        return tuple(found)
