"""What a step costs, learnt on line.

A decode step of B rows that verifies D draft tokens takes::

    seconds = a + b B + c D + d [D > 0]

with no coefficient below 0; d is what verifying any draft at all costs (the rejection sampler). The fit minimises
``(1 - predicted / seconds)**2`` and forgets old steps: noise grows with a step's length, and one that took many times
its due (a pause of the machine, a compilation) weighs little. :mod:`verl_rhyme.drafting.budget` grants draft tokens by
it. Time comes in as an argument; there is no clock here.
"""

from __future__ import annotations

import itertools

import numpy as np
from numba import njit

_FEATURES = 4
#: Steps between two fits.
REFIT_EVERY = 32
#: Every so many steps more is granted than pays, so that the cost of drafting stays known: up to a token a row, or up
#: to the longest draft where that is more.
EXPLORE_EVERY = 128


class StepCost:
    """The fit.

    Where steps with and without drafts can't be told apart yet, what all had in common is shared out between a and d:
    drafting nothing then looks cheaper than it may be, and is tried as soon as drafting gains little.

    Args:
        memory: Steps after which an observation counts 1/e.
    """

    def __init__(self, memory: int = 512):
        self._decay = 1 - 1 / memory
        self._xx = np.zeros((_FEATURES, _FEATURES))
        self._xy = np.zeros(_FEATURES)
        self._coefficients = np.zeros(_FEATURES)
        self.steps = 0

    @property
    def ready(self) -> bool:
        """Whether enough was seen, with more and fewer drafts, to tell what a draft token costs."""
        if not self._coefficients.any():
            return False
        weight, drafted, squares = self._xx[0, 0], self._xx[0, 2], self._xx[2, 2]
        return squares * weight - drafted**2 > 1e-6 * weight**2  # drafted tokens have varied

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Take in one decode step.

        Args:
            rows: Requests that decoded in it.
            drafted: Draft tokens that it verified.
            seconds: What it took.
        """
        if rows <= 0 or not np.isfinite(seconds) or seconds <= 0:
            return
        self.steps += 1
        _add(self._xx, self._xy, self._decay, float(rows), float(drafted), 1 / seconds)
        if self.steps % REFIT_EVERY == 0:
            self._coefficients = _non_negative_least_squares(self._xx, self._xy)

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds of a step, of each row, of each draft token, of drafting at all; zeros before there is a fit."""
        a, b, c, d = self._coefficients.tolist()
        return a, b, c, d


@njit(cache=True, nogil=True)
def _add(xx, xy, decay, rows, drafted, weight):
    x = (weight, weight * rows, weight * drafted, weight if drafted > 0 else 0.0)
    for i in range(_FEATURES):
        for j in range(_FEATURES):
            xx[i, j] = decay * xx[i, j] + x[i] * x[j]
        xy[i] = decay * xy[i] + x[i]


def _non_negative_least_squares(xx: np.ndarray, xy: np.ndarray) -> np.ndarray:
    """The best fit with no negative coefficient, from the normal equations: of all supports the best that has none.

    Of equally good ones the largest; within it columns that can't be told apart share alike.
    """
    best, least = np.zeros(_FEATURES), np.inf
    scale = np.sqrt(np.maximum(np.diag(xx), 1e-12))
    for size in range(_FEATURES, 0, -1):
        for support in map(list, itertools.combinations(range(_FEATURES), size)):
            matrix = xx[np.ix_(support, support)] / np.outer(scale[support], scale[support])
            solved = np.linalg.lstsq(matrix, xy[support] / scale[support], rcond=1e-9)[0] / scale[support]
            if (solved < 0).any():
                continue
            error = solved @ xx[np.ix_(support, support)] @ solved - 2 * solved @ xy[support]
            if error < least - 1e-9 * abs(least) or least == np.inf:
                best, least = np.zeros(_FEATURES), error
                best[support] = solved
    return best
