"""Reward function for verl: ``reward.custom_reward_function.path=examples/agent/reward.py``.

The score is 0.1 for an answer ``<answer> NAME </answer>`` at the end, plus 0.9 if it is right.
"""

from __future__ import annotations

import re
from typing import Any

FORM, RIGHT = 0.1, 0.9
_ANSWER = re.compile(r"<answer>\s*(\w+)\s*</answer>\s*$")


def compute_score(
    data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Return ``score`` in [0, 1] and ``acc``, 1 if the answer is right; ``solution_str`` has all turns and answers of
    tools."""
    answer = _ANSWER.search(str(solution_str))
    right = float(answer is not None and answer[1] == str(ground_truth))
    return {"score": FORM * (answer is not None) + RIGHT * right, "acc": right}
