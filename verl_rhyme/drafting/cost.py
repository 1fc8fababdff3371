"""Cost of a step, learnt online.

A decode step of B rows that verifies D draft tokens takes::

    seconds = a + b B + c D + d [D > 0]

with no negative coefficient; d is the fixed cost of verifying any draft (the rejection sampler). The fit minimises
``(1 - predicted / seconds)**2`` and forgets old steps. The relative error suits noise that grows with a step's length,
and gives little weight to outliers (a pause of the machine, a compilation). :mod:`verl_rhyme.drafting.budget` grants
draft tokens by this cost. The module has no clock: times are arguments.
"""

from __future__ import annotations

import itertools

import numpy as np
from numba import njit

_FEATURES = 4
#: Steps between two fits.
REFIT_EVERY = 32
#: Steps between two experiments. An experiment grants more than is profitable, so that the cost of drafting stays
#: known: up to one token a row, or the longest draft if that is more.
EXPLORE_EVERY = 128


class StepCost:
    """Online fit of the cost of a step.

    Before steps without drafts were observed, the fixed cost is shared between a and d. Drafting nothing then looks
    cheaper than it may be, and is tried as soon as drafting gains little.

    Args:
        memory: Steps after which an observation's weight has fallen to 1/e.
    """

    def __init__(self, memory: int = 512):
        self._decay = 1 - 1 / memory
        self._xx = np.zeros((_FEATURES, _FEATURES))
        self._xy = np.zeros(_FEATURES)
        self._coefficients = np.zeros(_FEATURES)
        self.steps = 0

    @property
    def ready(self) -> bool:
        """Whether the observed steps vary enough to estimate the cost of a draft token."""
        if not self._coefficients.any():
            return False
        weight, drafted, squares = self._xx[0, 0], self._xx[0, 2], self._xx[2, 2]
        return squares * weight - drafted**2 > 1e-6 * weight**2  # drafted tokens have varied

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Take in one decode step.

        Args:
            rows: Requests that decoded in the step.
            drafted: Draft tokens that the step verified.
            seconds: Duration of the step.
        """
        if rows <= 0 or not np.isfinite(seconds) or seconds <= 0:
            return
        self.steps += 1
        _add(self._xx, self._xy, self._decay, float(rows), float(drafted), 1 / seconds)
        if self.steps % REFIT_EVERY == 0:
            self._coefficients = _non_negative_least_squares(self._xx, self._xy)

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """Seconds of a step, of each row, of each draft token, and of drafting at all; zeros before the first fit."""
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
    """Return the best fit without negative coefficients, by solving the normal equations of every support.

    Of equally good supports the largest wins; indistinguishable columns share their coefficient.
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
