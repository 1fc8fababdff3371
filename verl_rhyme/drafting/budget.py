"""Which of the planned draft tokens a batch verifies.

With what a step costs (:mod:`verl_rhyme.drafting.cost`) the tokens are granted that emit most per second: with the
tokens of all rows in the order of falling value, v1 >= v2 >= ..., the k that maximises::

    (B + v1 + ... + vk) / (a + b B + c k + d [k > 0])

A token's value is the probability that it is reached and accepted. Where verifying is nearly free (decoding bound by
memory) that is all of them; where every token costs its share (a wide batch, a CPU) only the sure ones, or none: the
switch-off is a result, and the drafter then rests (:data:`verl_rhyme.drafting.adaptive.REST_AFTER`). At the optimum the
last token granted satisfies ``v >= c * rate``, the marginal rule.
"""

from __future__ import annotations

import numpy as np
from numba import njit

#: Coefficients of a step whose draft tokens cost nothing.
_FREE = (1.0, 0.0, 0.0, 0.0)
#: Of :func:`least`: never above what it is, whatever sums are rounded to.
_ROUNDING = 1 - 1e-6


def grant(
    reach: np.ndarray,
    planned: np.ndarray,
    budget: int,
    cost: tuple[float, float, float, float] | None = None,
) -> np.ndarray:
    """Choose the draft tokens of a batch: those of most value, wherever they are.

    Args:
        reach: float64[B, K], probability of each to be reached and accepted, falling along each row.
        planned: int64[B], tokens of each row that count.
        budget: Tokens for all.
        cost: Seconds of a step, of a row, of a draft token, and of drafting at all; grants no more than pay. ``None``:
            as many as the budget allows.

    Returns:
        int64[B], tokens granted; together at most ``min(budget, sum(planned))``, and just that without a cost.
    """
    return _grant(reach, planned, budget, cost or _FREE)


def least(cost: tuple[float, float, float, float], rows: int) -> float:
    """What a token is worth at least that :func:`grant` gives to a batch of so many rows.

    At the optimum the last token granted satisfies ``v >= c * rate``, and the rate is no less than without drafts.
    """
    a, b, c, _ = cost
    seconds = a + b * rows
    return _ROUNDING * c * rows / seconds if seconds > 0 else 0.0


@njit(cache=True, nogil=True)
def _grant(reach, planned, budget, cost):
    a, b, c, d = cost
    rows = len(planned)
    granted = np.zeros(rows, dtype=np.int64)
    total = planned.sum()
    seconds = a + b * rows
    # A fit to steps that all drafted may leave nothing to one without: what it costs is learnt by taking it.
    if budget <= 0 or total == 0 or seconds <= 0:
        return granted
    values, row = np.empty(total), np.empty(total, dtype=np.int64)
    n = 0
    for i in range(rows):
        for k in range(planned[i]):
            values[n], row[n] = -reach[i, k], i
            n += 1
    # Stable: within a row the earlier token comes first, so each row keeps a beginning.
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
