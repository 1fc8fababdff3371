"""Reward function for Knights and Knaves: ``reward.custom_reward_function.path=examples/data/logic_reward.py``.

As in Logic-RL (https://arxiv.org/abs/2502.14768) the score has two parts:

    format   +1     the response is <think> ... </think> <answer> ... </answer>, each tag once and nothing else
             -1     else
    answer   +2     all roles are right
             -1.5   each person has a role, but not all are right
             -2     a person has no role or two, or the format is wrong

Scores are 3, -0.5, -1 and -3. Standard library only: verl loads this file by its path.
"""

from __future__ import annotations

import re
from typing import Any

RIGHT_FORMAT, WRONG_FORMAT = 1.0, -1.0
RIGHT, WRONG, UNREADABLE = 2.0, -1.5, -2.0

_FORM = re.compile(r"\s*<think>(.*?)</think>\s*<answer>(?P<answer>.*?)</answer>\s*", re.DOTALL)
_TAG = re.compile(r"</?(?:think|answer)>")
_ROLE = re.compile(r"\b(?:knight|knave)s?\b", re.IGNORECASE)
_VERDICT = re.compile(r"\b([a-z]+)\W{0,5}\b(?:is\W{1,3})?(?:(?:an?|the)\W{1,3})?(knight|knave)\b", re.IGNORECASE)


def compute_score(
    data_source: Any,
    solution_str: Any,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    think_in_prompt: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """Return the score of one response; never raises.

    Args:
        data_source: Not used.
        solution_str: The decoded response.
        ground_truth: ``"Ann knight, Ben knave"``.
        extra_info: Not used.
        think_in_prompt: The prompt ends with ``<think>``, so responses start without it.

    Returns:
        ``score``, the sum of both parts; ``acc``, 1 if all roles are right, else 0; ``format``, 1 if the format is
        right, else 0; ``pred``, the roles in the ground truth's order, or ``""`` if they cannot be read.
    """
    response = ("<think>" if think_in_prompt else "") + str(solution_str)
    form = _FORM.fullmatch(response)
    if form is None or len(_TAG.findall(response)) != 4:
        return {"score": WRONG_FORMAT + UNREADABLE, "acc": 0.0, "format": 0.0, "pred": ""}
    truth = parse_roles(str(ground_truth))
    roles = parse_roles(form["answer"])
    if not truth or roles.keys() != truth.keys():
        return {"score": RIGHT_FORMAT + UNREADABLE, "acc": 0.0, "format": 1.0, "pred": ""}
    pred = ", ".join(f"{name} {roles[name]}" for name in truth)
    right = roles == truth
    return {"score": RIGHT_FORMAT + (RIGHT if right else WRONG), "acc": float(right), "format": 1.0, "pred": pred}


def parse_roles(text: str) -> dict[str, str]:
    """Parse ``"(1) Ann is a knight, (2) Ben is a knave"`` into ``{"ann": "knight", "ben": "knave"}``.

    Return ``{}`` if a role has no person ("Ann is not a knight") or a person has two roles.
    """
    verdicts = [(name.lower(), role.lower()) for name, role in _VERDICT.findall(text)]
    roles = dict(verdicts)
    every_role_counts = len(roles) == len(verdicts) == len(_ROLE.findall(text))
    return roles if every_role_counts else {}
