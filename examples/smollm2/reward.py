"""Reward function for verl, loaded by path (``reward.custom_reward_function.path``)."""

from __future__ import annotations

import re
from typing import Any


def compute_score(
    data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Return 1 if the answer follows the last "the answer is", else 0.

    Args:
        data_source: Unused.
        solution_str: Response.
        ground_truth: A number, or words in order.
    """
    _, marker, rest = str(solution_str).lower().rpartition("the answer is")
    words = re.findall(r"-?\d+(?:\.\d+)?|[a-z]+", rest.replace("x =", ""))
    answer = re.findall(r"-?\d+|[a-z]+", str(ground_truth).lower())
    right = bool(marker) and words[: len(answer)] == answer
    return {"score": float(right), "acc": float(right)}
