"""Reward function for verl, loaded by path (``reward.custom_reward_function.path``)."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from typing import Any

_FORM = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
_STEP = re.compile(r"\s*(\d+)\s*([-+*/])\s*(\d+)\s*=\s*(\d+)\s*")


def compute_score(
    data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Return 0.1 for the form plus 0.9 for steps that make the goal. ``ground_truth`` is :meth:`Task.text`."""
    form = _FORM.fullmatch(str(solution_str))
    if form is None:
        return {"score": 0.0, "acc": 0.0}
    goal, *numbers = map(int, re.findall(r"\d+", str(ground_truth)))
    right = _makes(form[2].split(","), goal, Counter(numbers))
    return {"score": 0.1 + 0.9 * right, "acc": float(right)}


def _makes(steps: list[str], goal: int, left: Counter[int]) -> bool:
    """Return whether the steps use only available numbers and end with the goal."""
    result = None
    for text in steps:
        step = _STEP.fullmatch(text)
        if step is None:
            return False
        a, b, result = int(step[1]), int(step[3]), int(step[4])
        left.subtract((a, b))
        if min(left.values()) < 0:
            return False
        if step[2] == "/":
            value = Fraction(a, b) if b else None
        else:
            value = Fraction({"+": a + b, "-": a - b, "*": a * b}[step[2]])
        if value != result:
            return False
        left[result] += 1
    return result == goal
