"""Two runs compared where their responses are equally long.

Seconds a step fall when responses get shorter, whatever was done to the engine. So steps are put into bins by their
mean response length, each bin a tenth wide, and only what lies in one bin is compared: the medians of the tokens a
second in both runs. The first epoch is left out, as in the summary: there is no history yet. Of a sorted rollout,
which trains in one step what it may have generated in the one before, a load (what was loaded together) is one point.
Where prompts are loaded as others leave each step is, with what it trains in place of what it made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from verl_rhyme.observability import metrics, steps

#: A bin's upper end over its lower one.
WIDTH = 1.1


@dataclass(frozen=True)
class Point:
    """A step, or a load: its mean response length in tokens, and response tokens per second of rollout."""

    length: float
    speed: float
    epoch: int


@dataclass(frozen=True)
class Bin:
    """Steps of equal mean response length, of both runs: [low, high) tokens, how many, their median tokens a second."""

    low: float
    high: float
    first: int
    second: int
    first_speed: float
    second_speed: float

    @property
    def ratio(self) -> float:
        """How many times the second's speed the first one has."""
        return self.first_speed / self.second_speed


@dataclass(frozen=True)
class Matched:
    """The comparison.

    Attributes:
        bins: Those that have steps of both runs.
        unmatched: Warm steps of the first and of the second that no step of the other is like.
        ratio: Geometric mean of the bins' ratios, weighted by the steps of the run that has fewer there; ``None``
            without bins.
    """

    bins: list[Bin]
    unmatched: tuple[int, int]
    ratio: float | None


def points(by_step: steps.Steps) -> list[Point]:
    """Of the steps that tell enough; of a load all must."""
    found = []
    for load in _loads(by_step):
        tokens, seconds = [metrics.response_tokens(data) for data in load], [metrics.rollout_s(data) for data in load]
        lengths = [_length(data) for data in load]
        if all(tokens) and all(seconds) and all(lengths):
            total = sum(filter(None, tokens))
            responses = sum(count / length for count, length in zip(tokens, lengths, strict=True) if count and length)
            epoch = int(load[0][metrics.EPOCH]) + 1
            found.append(Point(total / responses, total / sum(filter(None, seconds)), epoch))
    return found


def _loads(by_step: steps.Steps) -> list[list[Mapping[str, Any]]]:
    """Steps, together where they train one load; the last load only if it has as many as the one before.

    A load begins where more prompts were loaded than may take the place of dropped ones, of this step or of earlier
    ones of the load: what is dropped at a step's end is replaced in the next.
    """
    found: list[list[Mapping[str, Any]]] = []
    owed = 0.0
    for data in by_step.values():
        loaded = metrics.finite(data, metrics.SORTED_LOADED)
        dropped = metrics.finite(data, metrics.SORTED_DROPPED) or 0.0
        owed += dropped
        if loaded is None or loaded > owed or not found:
            found.append([])
            owed = dropped  # how many of these were replaced at once is not told
        else:
            owed -= loaded
        found[-1].append(data)
    return found[:-1] if len(found) > 1 and len(found[-1]) < len(found[-2]) else found


def _length(data: Mapping[str, Any]) -> float | None:
    mean = metrics.finite(data, metrics.RESPONSE_LENGTH_MEAN)
    if mean is None:
        tokens, requests = metrics.finite(data, metrics.TRAINED_TOKENS), metrics.finite(data, metrics.REQUESTS)
        mean = tokens / requests if tokens and requests else None
    return mean


def match(first: list[Point], second: list[Point], first_warm_epoch: int) -> Matched:
    """Compare two runs' points; see the module."""
    binned: list[dict[int, list[float]]] = []
    for found in (first, second):
        mine: dict[int, list[float]] = {}
        for point in found:
            if point.epoch >= first_warm_epoch:
                mine.setdefault(math.floor(math.log(point.length, WIDTH)), []).append(point.speed)
        binned.append(mine)
    ours, theirs = binned
    bins = [
        Bin(WIDTH**k, WIDTH ** (k + 1), len(ours[k]), len(theirs[k]), median(ours[k]), median(theirs[k]))
        for k in sorted(ours.keys() & theirs.keys())
    ]
    alone = (
        sum(len(speeds) for k, speeds in ours.items() if k not in theirs),
        sum(len(speeds) for k, speeds in theirs.items() if k not in ours),
    )
    weights = [min(b.first, b.second) for b in bins]
    ratio = None
    if bins:
        ratio = math.exp(sum(w * math.log(b.ratio) for w, b in zip(weights, bins, strict=True)) / sum(weights))
    return Matched(bins, alone, ratio)
