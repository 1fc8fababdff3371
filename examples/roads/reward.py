"""Reward function for verl, loaded by path (``reward.custom_reward_function.path``)."""

from __future__ import annotations

import itertools
import re
from typing import Any

_FORM = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)


def compute_score(
    data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Return 0.1 for the form plus 0.9 for a way on the map. ``ground_truth`` is :meth:`Map.text`."""
    form = _FORM.fullmatch(str(solution_str))
    if form is None:
        return {"score": 0.0, "acc": 0.0}
    listed, _, ends = str(ground_truth).removeprefix("roads: ").partition(". from ")
    towns = (town.split(": ") for town in listed.split(". "))
    roads = {frozenset((a, b)) for a, others in towns for b in others.split()}
    start, _, goal = ends.partition(" to ")
    way = form[2].split()
    right = len(way) > 1 and way[0] == start and way[-1] == goal
    right = right and all(frozenset(step) in roads for step in itertools.pairwise(way))
    return {"score": 0.1 + 0.9 * right, "acc": float(right)}
