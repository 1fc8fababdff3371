"""Comparison of two runs at equal response lengths.

Steps get faster when responses get shorter, whatever was done to the engine. So steps are binned by mean response
length, with bins 10% wide, and speeds are compared within a bin: the medians of tokens per second of both runs. The
first epoch is left out, as in the summary, because the history is still empty. A sorted rollout may train tokens in a
later step than it generated them, so the steps that train one batch of loaded prompts form one point. If prompts are
loaded continuously, each step is a point and counts the tokens it trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from verl_rhyme.observability import metrics, steps

#: Ratio of a bin's upper end to its lower end.
WIDTH = 1.1


@dataclass(frozen=True)
class Point:
    """Step, or steps of one batch of loaded prompts: mean response length in tokens, response tokens per second."""

    length: float
    speed: float
    epoch: int


@dataclass(frozen=True)
class Bin:
    """Steps of both runs with mean length in [low, high) tokens: their numbers and median tokens per second."""

    low: float
    high: float
    first: int
    second: int
    first_speed: float
    second_speed: float

    @property
    def ratio(self) -> float:
        return self.first_speed / self.second_speed


def points(by_step: steps.Steps) -> list[Point]:
    """Return the points of steps with the necessary metrics; all steps of a point must have them."""
    points = []
    for group in _steps_by_loading(by_step):
        tokens, seconds = [metrics.response_tokens(data) for data in group], [metrics.rollout_s(data) for data in group]
        lengths = [_length(data) for data in group]
        if all(tokens) and all(seconds) and all(lengths):
            total = sum(filter(None, tokens))
            responses = sum(count / length for count, length in zip(tokens, lengths, strict=True) if count and length)
            epoch = int(group[0][metrics.EPOCH]) + 1
            points.append(Point(total / responses, total / sum(filter(None, seconds)), epoch))
    return points


def _steps_by_loading(by_step: steps.Steps) -> list[list[Mapping[str, Any]]]:
    """Group the steps that train one batch of loaded prompts; drop the last group if it has fewer than the one before.

    A group begins when more prompts are loaded than can replace dropped ones of this step or earlier steps of the
    group. Prompts dropped at the end of a step are replaced in the next.
    """
    groups: list[list[Mapping[str, Any]]] = []
    owed = 0.0
    for data in by_step.values():
        loaded = metrics.finite(data, metrics.LOADED_PROMPTS)
        dropped = metrics.finite(data, metrics.DROPPED_PROMPTS) or 0.0
        owed += dropped
        if loaded is None or loaded > owed or not groups:
            groups.append([])
            owed = dropped  # some of these may have been replaced at once, which is not logged
        else:
            owed -= loaded
        groups[-1].append(data)
    return groups[:-1] if len(groups) > 1 and len(groups[-1]) < len(groups[-2]) else groups


def _length(data: Mapping[str, Any]) -> float | None:
    mean = metrics.finite(data, metrics.RESPONSE_LENGTH_MEAN)
    if mean is None:
        tokens, requests = metrics.finite(data, metrics.TRAINED_TOKENS), metrics.finite(data, metrics.REQUESTS)
        mean = tokens / requests if tokens and requests else None
    return mean


def match(first: list[Point], second: list[Point], first_warm_epoch: int) -> list[Bin]:
    """Return the bins with warm steps of both runs."""
    binned: tuple[dict[int, list[float]], dict[int, list[float]]] = {}, {}
    for mine, points_of_run in zip(binned, (first, second), strict=True):
        for point in points_of_run:
            if point.epoch >= first_warm_epoch:
                mine.setdefault(math.floor(math.log(point.length, WIDTH)), []).append(point.speed)
    ours, theirs = binned
    return [
        Bin(WIDTH**k, WIDTH ** (k + 1), len(ours[k]), len(theirs[k]), median(ours[k]), median(theirs[k]))
        for k in sorted(ours.keys() & theirs.keys())
    ]


def mean_ratio(bins: list[Bin]) -> float:
    """Return the geometric mean of the bins' ratios, weighted by the smaller number of steps."""
    weights = [min(b.first, b.second) for b in bins]
    return float(np.exp(np.average([math.log(b.ratio) for b in bins], weights=weights)))
