"""Rule-based reward function for verl: ``reward.custom_reward_function.path=examples/tiny_world/reward.py``.

    score = 0.1 format + 0.1 share of people right + 0.8 all people right       (from 0 to 1)

Without the form ``<think> ... </think> <answer> ... </answer>`` the score is 0. Uses only the standard library, because
verl loads the file by its path.
"""

from __future__ import annotations

import re
from typing import Any

FORMAT, SHARE, RIGHT = 0.1, 0.1, 0.8

_FORM = re.compile(r"\s*<think>(?P<reasoning>.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")
_VERDICT = re.compile(r"\s*(\w+)\s+(knight|knave)\s*")


def compute_score(
    data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None, **kwargs: Any
) -> dict[str, float]:
    """Return the score of one response; never raises.

    Args:
        data_source: Not used.
        solution_str: The decoded response.
        ground_truth: ``"Ann knight, Ben knave"``.
        extra_info: Not used.

    Returns:
        ``score`` in [0, 1]; ``acc``, 1 if all people are right, else 0; ``format``, 1 if the form is right, else 0.
    """
    form = _FORM.fullmatch(str(solution_str))
    if form is None or len(_TAG.findall(form.string)) != 4:
        return {"score": 0.0, "acc": 0.0, "format": 0.0}
    truth, answer = parse_answer(str(ground_truth)), parse_answer(form["answer"])
    if not truth or answer is None or answer.keys() - truth.keys():
        return {"score": FORMAT, "acc": 0.0, "format": 1.0}
    share = sum(answer.get(name) == kind for name, kind in truth.items()) / len(truth)
    right = float(answer == truth)
    return {"score": FORMAT + SHARE * share + RIGHT * right, "acc": right, "format": 1.0}


def parse_answer(text: str) -> dict[str, str] | None:
    """Parse ``"Ann knight, Ben knave"`` into a mapping; ``None`` if malformed or if a name occurs twice."""
    verdicts = [_VERDICT.fullmatch(part) for part in text.split(",")]
    if any(verdict is None for verdict in verdicts):
        return None
    answer = {verdict[1]: verdict[2] for verdict in verdicts if verdict}
    return answer if len(answer) == len(verdicts) else None
