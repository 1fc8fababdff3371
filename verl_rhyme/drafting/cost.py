"""What a draft token costs, learnt on line, and how many tokens it pays to draft.

A decode step of B rows that verifies D draft tokens takes::

    seconds = a + b B + c D

with a, b, c at least 0, fitted by least squares that forget old steps. The drafts of a batch are chosen to emit most
tokens a second: with the tokens of all rows in the order of falling probability to be reached and accepted, p1 >= p2
>= ..., the k that maximises ``(B + p1 + ... + pk) / (a + b B + c k)``. Where verifying is nearly free (decoding bound
by memory) that is all of them; where every token costs its share (a wide batch, a CPU) only the sure ones, or none:
the switch-off is a result. At the optimum the last token granted satisfies ``p >= c * rate``, the marginal rule.

Time comes in as an argument; there is no clock here.
"""

from __future__ import annotations

import itertools

import numpy as np

_FEATURES = 3
#: Every so many steps all planned tokens are granted, so that the cost of drafting stays known where it does not pay.
EXPLORE_EVERY = 128


class StepCost:
    """The fit.

    Args:
        memory: Steps after which an observation counts 1/e.
        enough: Steps to see before :attr:`ready`.
    """

    def __init__(self, memory: int = 512, enough: int = 48):
        self._decay = 1 - 1 / memory
        self._enough = enough
        self._xx = np.zeros((_FEATURES, _FEATURES))
        self._xy = np.zeros(_FEATURES)
        self._coefficients = np.zeros(_FEATURES)
        self.steps = 0

    @property
    def ready(self) -> bool:
        """Whether enough was seen, with and without drafts, to tell what a draft token costs."""
        if self.steps < self._enough or self._coefficients[0] + self._coefficients[1] <= 0:
            return False
        weight, drafted, squares = self._xx[0, 0], self._xx[0, 2], self._xx[2, 2]
        return squares * weight - drafted**2 > 1e-6 * weight**2  # drafted tokens have varied

    def observe(self, rows: int, drafted: int, seconds: float) -> None:
        """Take in one decode step.

        Args:
            rows: Requests that decoded in it.
            drafted: Draft tokens that it verified.
            seconds: What it took. A step that took several times what the fit expects (a pause of the machine, a
                compilation) counts for three times the expectation only.
        """
        if rows <= 0 or not np.isfinite(seconds) or seconds <= 0:
            return
        x = np.array([1.0, rows, drafted])
        if self.steps >= self._enough:
            seconds = min(seconds, 3 * max(self.predict(rows, drafted), 1e-6))
        elif self.steps < 4:  # warm-up
            self.steps += 1
            return
        self._xx = self._decay * self._xx + np.outer(x, x)
        self._xy = self._decay * self._xy + x * seconds
        self.steps += 1
        if self.steps % 16 == 0 or self.steps == self._enough:
            self._coefficients = _non_negative_least_squares(self._xx, self._xy)

    def predict(self, rows: int, drafted: int) -> float:
        """Seconds of a step; 0 before there is a fit."""
        return float(self._coefficients @ (1.0, rows, drafted))

    def worth(self, reach: np.ndarray, rows: int) -> int:
        """How many of the draft tokens to grant.

        Args:
            reach: float[n], probability of each to be reached and accepted, falling.
            rows: Requests of the step.

        Returns:
            From 0 to n; n while the fit is not ready.
        """
        if not self.ready or not len(reach):
            return len(reach)
        a, b, c = self._coefficients
        tokens = rows + np.concatenate([[0.0], np.cumsum(reach)])
        seconds = a + b * rows + c * np.arange(len(reach) + 1)
        return int(np.argmax(tokens / seconds))


def _non_negative_least_squares(xx: np.ndarray, xy: np.ndarray) -> np.ndarray:
    """The best fit with no negative coefficient, from the normal equations: of all supports the best that has none."""
    best, least = np.zeros(_FEATURES), np.inf
    scale = np.sqrt(np.maximum(np.diag(xx), 1e-12))
    for size in range(1, _FEATURES + 1):
        for support in map(list, itertools.combinations(range(_FEATURES), size)):
            matrix = xx[np.ix_(support, support)] / np.outer(scale[support], scale[support])
            solved = np.linalg.lstsq(matrix, xy[support] / scale[support], rcond=1e-9)[0] / scale[support]
            if (solved < 0).any():
                continue
            error = solved @ xx[np.ix_(support, support)] @ solved - 2 * solved @ xy[support]
            if error < least:
                best, least = np.zeros(_FEATURES), error
                best[support] = solved
    return best
