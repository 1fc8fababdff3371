"""Selection of the planned draft tokens that a batch verifies.

The selection maximises the tokens emitted per second under the cost of a step (:mod:`verl_rhyme.drafting.cost`). With
the planned tokens of all rows sorted by value, v1 >= v2 >= ..., it grants the first k, for the k that maximises::

    (B + v1 + ... + vk) / (a + b B + c k + d [k > 0])

A token's value is the probability that it is reached and accepted. If verification is nearly free (decoding bound by
memory), all tokens are granted. If every token has its cost (a wide batch, a CPU), only likely tokens or none are
granted, and the drafter then rests (:data:`verl_rhyme.drafting.adaptive.REST_AFTER`). At the optimum the last granted
token satisfies ``v >= c * rate``, the marginal rule.
"""

from __future__ import annotations

import numpy as np
from numba import njit

#: Cost of a step whose draft tokens cost nothing: as many are granted as the budget allows.
FREE = (1.0, 0.0, 0.0, 0.0)
#: Factor that keeps :func:`lowest_profitable` a lower bound under rounding.
_ROUNDING = 1 - 1e-6


@njit(cache=True, nogil=True)
def select_tokens(
    reach: np.ndarray, planned: np.ndarray, budget: int, cost: tuple[float, float, float, float]
) -> np.ndarray:
    """Choose the most valuable draft tokens of a batch.

    Args:
        reach: float64[B, K], probability that each token is reached and accepted, decreasing along each row.
        planned: int64[B], planned tokens of each row.
        budget: Most draft tokens of the batch.
        cost: Seconds of a step, of a row, of a draft token, and of drafting at all; only profitable tokens are granted.

    Returns:
        int64[B], granted tokens; their sum is at most ``min(budget, sum(planned))``, and equal to it with :data:`FREE`.
    """
    a, b, c, d = cost
    rows = len(planned)
    granted = np.zeros(rows, dtype=np.int64)
    total = planned.sum()
    seconds = a + b * rows
    # A fit to steps that all drafted may give a step without drafts no cost; such a step measures it.
    if budget <= 0 or total == 0 or seconds <= 0:
        return granted
    values, row = np.empty(total), np.empty(total, dtype=np.int64)
    n = 0
    for i in range(rows):
        for k in range(planned[i]):
            values[n], row[n] = -reach[i, k], i
            n += 1
    # A stable sort keeps the earlier token of a row first, so each row is granted a prefix.
    order = np.argsort(values, kind="mergesort")
    tokens = float(rows)
    best, most = 0, tokens / seconds
    seconds += d
    for k in range(min(total, budget)):
        tokens -= values[order[k]]
        seconds += c
        if tokens >= most * seconds:
            best, most = k + 1, tokens / seconds
    for k in range(best):
        granted[row[order[k]]] += 1
    return granted


def lowest_profitable(cost: tuple[float, float, float, float], rows: int) -> float:
    """Return a lower bound of the value of every token that :func:`select_tokens` grants to a batch of ``rows`` rows.

    At the optimum the last granted token satisfies ``v >= c * rate``, and the rate is at least that without drafts.
    """
    a, b, c, _ = cost
    seconds = a + b * rows
    return _ROUNDING * c * rows / seconds if seconds > 0 else 0.0
