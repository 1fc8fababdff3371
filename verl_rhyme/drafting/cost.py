"""Price of a step, learnt online.

A step of B rows that verifies D draft tokens and computes P prompt tokens takes::

    seconds = a + b B + e P + d [D > 0] + m [model] + f(B + D) + x u(B + D + P)

f is convex and made of lines: flat while the step is bound by memory, a knee, then proportional. u is concave: the
experts of a layer that so many tokens choose (:class:`~verl_rhyme.planning.architecture.Experts`), none without a
mixture. No coefficient is negative; d is the fixed cost of verifying any draft, m that of the model's own drafter.
Batch widths (powers of two) have sums of their own, which forget old steps of that width only. A fit takes the sums of
the other widths as few observations, and a guess (:data:`MEMORY_BOUND`) as fewer. It minimises ``(1 - predicted /
seconds)**2``: the relative error suits noise that grows with a step's length, and gives little weight to outliers (a
pause of the machine, a compilation).
"""

from __future__ import annotations

import numpy as np

from verl_rhyme.compiled import compiled
from verl_rhyme.planning.experts import Experts

#: Guess before anything was measured: a step costs as much as this many tokens beyond those that it computes. A step
#: of a mixture costs as much as one token's experts beyond those that it loads, if drafts then cost more.
MEMORY_BOUND = 8.0
#: Weight of the guess, in observations of a draft token a row; and of the guess that the slope does not change.
_GUESS, _STRAIGHT = 0.2, 0.02
#: Most observations that another width counts as, halved with each doubling between the widths.
_SHARED = 16.0
#: Tokens of a step at which the slope of its price may change, besides 0.
_KNOTS = np.array([m * 2.0**j for j in range(1, 13) for m in (1.0, 1.5)])
_BASE, _ROW, _PROMPT, _DRAFTING, _MODEL, _EXPERTS, _TOKEN = range(7)
_FEATURES = 7 + len(_KNOTS)
#: Most steps of a width between two fits: the price rises while contexts grow.
_SELDOM = 32
#: Classes of batch widths.
WIDTHS = 16
#: Most passes of a fit over the coefficients; it ends where a pass changes the price by less than ``_CLOSE``.
_PASSES, _CLOSE = 200, 1e-4


class StepCost:
    """Online fit of the price of a step; an observation's weight falls to 1/e in ``memory`` steps of its width."""

    def __init__(self, memory: int = 512, experts: Experts | None = None):
        self._decay = 1 - 1 / memory
        self.experts = experts or Experts()
        self._xx = np.zeros((WIDTHS, _FEATURES, _FEATURES))
        self._xy = np.zeros((WIDTHS, _FEATURES))
        self._weight = np.zeros(WIDTHS)  # observations, decayed as the sums
        self._fits = np.zeros((WIDTHS, _FEATURES))
        self._next = np.zeros(WIDTHS, dtype=np.int64)  # steps of the width at its next fit
        self.largest = 0  # tokens of the largest step, without prompts
        self.steps = np.zeros(WIDTHS, dtype=np.int64)

    @property
    def ready(self) -> bool:
        return self.largest > 0

    def observe(self, rows: int, drafted: int, seconds: float, prefilled: int = 0, proposed: bool = False) -> None:
        """Take in a step of ``rows`` decoding requests, ``drafted`` verified tokens and ``prefilled`` prompt tokens.

        ``proposed``: the model's own drafter has drafted at its end.
        """
        if rows <= 0 or not np.isfinite(seconds) or seconds <= 0:
            return
        width = width_of(rows)
        self.steps[width] += 1
        self._weight[width] = self._decay * self._weight[width] + 1
        self.largest = max(self.largest, rows + drafted)
        loaded = float(self.experts.loaded(rows + drafted + prefilled))
        _add(self._xx[width], self._xy[width], self._decay, rows, drafted, prefilled, proposed, loaded, 1 / seconds)

    def room(self, rows: int) -> int:
        """Return the most draft tokens whose price is more than a guess: twice as many as a step ever verified."""
        return max(4, rows // 4, 2 * (self.largest - rows))

    def prices(self, rows: int, most: int) -> np.ndarray:
        """Return the seconds of a step of ``rows`` rows with 0 to ``most`` draft tokens, float64[most + 1]."""
        width = width_of(rows)
        if self.steps[width] >= self._next[width]:  # early steps teach much, later ones little
            self._next[width] = self.steps[width] + 1 + min(self.steps[width] // 16, _SELDOM)
            shares = np.minimum(1, _SHARED / np.maximum(self._weight, 1e-9)) * 0.5 ** abs(np.arange(WIDTHS) - width)
            shares[width] = 1
            one, once, twice = (float(self.experts.loaded(tokens)) for tokens in (1, rows, 2 * rows))
            _fit(self._xx, self._xy, shares, self._fits[width], width, float(rows), (one, once, twice))
        return _prices(self._fits[width], rows, most, float(self.experts.count), self.experts.share)

    def proposal(self, rows: int) -> float:
        """Return the seconds that the model's own drafter adds to a step, as of the last :meth:`prices`."""
        return float(self._fits[width_of(rows), _MODEL])

    def drafting(self, rows: int) -> float:
        """Return the seconds that any draft adds to a step, as of the last :meth:`prices`: the host's, for one."""
        return float(self._fits[width_of(rows), _DRAFTING])


def width_of(rows: int) -> int:
    return min(rows.bit_length(), WIDTHS - 1)


@compiled
def _add(xx, xy, decay, rows, drafted, prefilled, proposed, loaded, weight):
    x = np.empty(_FEATURES)
    x[_BASE], x[_ROW], x[_PROMPT], x[_DRAFTING], x[_MODEL] = 1.0, rows, prefilled, drafted > 0, proposed
    x[_EXPERTS], x[_TOKEN] = loaded, rows + drafted
    x[_TOKEN + 1 :] = np.maximum(0.0, rows + drafted - _KNOTS)
    x *= weight
    for i in range(_FEATURES):
        for j in range(_FEATURES):
            xx[i, j] = decay * xx[i, j] + x[i] * x[j]
        xy[i] = decay * xy[i] + x[i]


@compiled
def _fit(all_xx, all_xy, shares, fit, width, rows, loaded):
    """Coordinate descent from the width's last fit; no coefficient is negative."""
    xx, xy = np.zeros((_FEATURES, _FEATURES)), np.zeros(_FEATURES)
    for other in range(len(shares)):
        if all_xx[other, 0, 0] > 0:
            xx += shares[other] * all_xx[other]
            xy += shares[other] * all_xy[other]
    if xx[0, 0] <= 0:
        return
    typical = xy[0] / xx[0, 0]  # seconds
    # The guess is the ratio of two prices on one line; their level is not guessed.
    ratio = (2 * rows + MEMORY_BOUND) / (rows + MEMORY_BOUND)
    one, once, twice = loaded
    if one > 0:
        ratio = max(ratio, (twice + one) / (once + one))
    features = ((_BASE, 1.0, 1.0), (_ROW, rows, rows), (_TOKEN, rows, 2 * rows), (_EXPERTS, once, twice))
    for i, x, x_twice in features:
        for j, y, y_twice in features:
            xx[i, j] += _GUESS * (x_twice / ratio - x) * (y_twice / ratio - y) / typical**2
    for k in range(len(_KNOTS)):
        xx[_TOKEN + 1 + k, _TOKEN + 1 + k] += _STRAIGHT * (_KNOTS[k] / typical) ** 2
    least = 2.0 ** (width - 1)  # rows; a step of this width has no fewer tokens, and needs no knot among fewer
    free = [i for i in range(_FEATURES) if i <= _TOKEN or _KNOTS[i - _TOKEN - 1] > least]
    fit[_TOKEN + 1 : _TOKEN + 1 + _FEATURES - len(free)] = 0.0
    for _ in range(_PASSES):
        change = 0.0
        for i in free:
            gradient = -xy[i]
            for j in free:
                gradient += xx[i, j] * fit[j]
            value = max(0.0, fit[i] - gradient / xx[i, i]) if xx[i, i] > 0 else 0.0
            change = max(change, abs(value - fit[i]) * np.sqrt(xx[i, i] / xx[0, 0]))
            fit[i] = value
        if change < _CLOSE * typical:
            break


@compiled
def _prices(fit, rows, most, experts, share):
    prices = np.empty(most + 1)
    price = fit[_BASE] + fit[_ROW] * rows + fit[_TOKEN] * rows
    slope, knot = fit[_TOKEN], 0
    while knot < len(_KNOTS) and _KNOTS[knot] <= rows:
        price += fit[_TOKEN + 1 + knot] * (rows - _KNOTS[knot])
        slope += fit[_TOKEN + 1 + knot]
        knot += 1
    expert, unread = fit[_EXPERTS], experts * (1 - share) ** rows
    prices[0] = price + expert * (experts - unread)
    price += fit[_DRAFTING]
    for drafted in range(1, most + 1):
        price += slope
        unread *= 1 - share
        prices[drafted] = price + expert * (experts - unread)
        if knot < len(_KNOTS) and _KNOTS[knot] <= rows + drafted:
            slope += fit[_TOKEN + 1 + knot]
            knot += 1
    return prices
