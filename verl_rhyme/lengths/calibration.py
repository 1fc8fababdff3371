"""Calibration of a ranker: from scores to lengths, by prompts with known lengths.

A ranking loss determines the order of scores, not their scale. An isotonic regression of log lengths on scores (Barlow
and others, 1972) restores the scale. Interpolation between the means of its steps keeps different scores different
(centred isotonic regression: Oron and Flournoy, Stat. Biopharm. Res. 2017). Beyond the first and the last step, the
overall slope continues: the longest prompts lie beyond the held-out ones and are distinguished too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_rhyme.lengths.pairs import Pairs

Floats = npt.NDArray[np.float64]

#: Kept quantiles of log lengths around their location.
SHARES: Floats = np.linspace(0.025, 0.975, 39)


class Calibration:
    """A calibration; see the module.

    Args:
        scores: float64[K], ascending.
        locations: float64[K], mean log length at each score, not descending.
        residuals: float64[len(SHARES)], quantiles of the log length less its location.
        slope: Log length by score, beyond the first and the last of ``scores``; not negative.

    Raises:
        ValueError: Sizes do not match, or numbers are not finite or descend.
    """

    def __init__(self, scores: Floats, locations: Floats, residuals: Floats, slope: float = 0.0) -> None:
        knots = np.asarray(scores, dtype=np.float64), np.asarray(locations, dtype=np.float64)
        if len(knots[0]) != len(knots[1]) or not len(knots[0]) or len(residuals) != len(SHARES):
            raise ValueError(
                f"a torn calibration: {len(scores)} scores, {len(locations)} locations, {len(residuals)} residuals"
            )
        rows = (*knots, np.asarray(residuals, dtype=np.float64))
        if any(not np.isfinite(row).all() or (np.diff(row) < 0).any() for row in rows):
            raise ValueError("a calibration needs finite, ascending numbers")
        if not 0 <= slope < np.inf:
            raise ValueError(f"a calibration's slope must be finite and at least 0, not {slope}")
        self._scores, self._locations, self._residuals = rows
        self._slope = slope

    @classmethod
    def fit(cls, scores: Floats, known: Pairs) -> Calibration:
        """Return the calibration of scores that were not trained on these prompts.

        Args:
            scores: float64[P].
            known: The same P prompts.
        """
        from scipy.optimize import isotonic_regression  # the import takes a second

        order = np.argsort(scores, kind="stable")
        sizes = np.array([len(lengths) for lengths in known.lengths], dtype=np.float64)
        x, y, weight = np.asarray(scores, dtype=np.float64)[order], known.locations[order], sizes[order]
        fitted = isotonic_regression(y, weights=weight).x
        _, step = np.unique(fitted, return_inverse=True)
        total = np.bincount(step, weight)
        centres = np.bincount(step, weight * x) / total
        levels = np.bincount(step, weight * fitted) / total
        spread = np.average((x - np.average(x, weights=weight)) ** 2, weights=weight)
        together = np.average((x - np.average(x, weights=weight)) * y, weights=weight)
        slope = max(0.0, float(together / spread)) if spread > 1e-12 else 0.0
        made = cls(centres, levels, np.zeros(len(SHARES)), slope)
        at = made.location(np.asarray(scores, dtype=np.float64))
        around = np.concatenate([np.log(n) - a for n, a in zip(known.lengths, at, strict=True)])
        return cls(centres, levels, np.quantile(around, SHARES), slope)

    def location(self, scores: Floats) -> Floats:
        """Return float64[B], expected log length at each score."""
        inner = np.clip(scores, self._scores[0], self._scores[-1])
        return np.interp(inner, self._scores, self._locations) + self._slope * (scores - inner)

    def quantile(self, scores: Floats, share: float) -> Floats:
        """Return float64[B], tokens that a share of responses at each score does not exceed."""
        return np.exp(self.location(scores) + np.interp(share, SHARES, self._residuals))

    def mean(self, scores: Floats) -> Floats:
        """Return float64[B], expected tokens of a response at each score."""
        return np.exp(self.location(scores)) * np.exp(self._residuals).mean()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values for JSON."""
        rows = {"scores": self._scores, "locations": self._locations, "residuals": self._residuals}
        return {**{name: row.tolist() for name, row in rows.items()}, "slope": self._slope}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Calibration:
        """Return the calibration of a :meth:`state_dict`.

        Raises:
            ValueError: The state is incomplete or invalid.
        """
        try:
            scores, locations, residuals = (
                np.array(state[name], dtype=np.float64) for name in ("scores", "locations", "residuals")
            )
            return cls(scores, locations, residuals, float(state["slope"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no calibration: {error}") from error
