"""From a ranker's scores to lengths: what a score meant for prompts whose lengths are known.

A ranking loss fixes the order of scores and not their scale. An isotonic regression of log lengths on scores (Barlow
and others, 1972) gives the scale back; between the means of its steps it is interpolated, so that scores which differ
get lengths which differ (centred isotonic regression: Oron and Flournoy, Stat. Biopharm. Res. 2017). Beyond the first
and the last it goes on with the slope of all: the longest prompts are beyond what was held out, and are told apart too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_rhyme.lengths.pairs import Pairs

Floats = npt.NDArray[np.float64]

#: Quantiles of log lengths around their location that are kept.
SHARES: Floats = np.linspace(0.025, 0.975, 39)


class Calibration:
    """See the module.

    Args:
        scores: float64[K], ascending.
        locations: float64[K], mean log length at each of them, not descending.
        residuals: float64[len(SHARES)], quantiles of the log length less its location.
        slope: Log length by score, beyond the first and the last of ``scores``; not negative.

    Raises:
        ValueError: They are torn, not finite or descend.
    """

    def __init__(self, scores: Floats, locations: Floats, residuals: Floats, slope: float = 0.0) -> None:
        knots = np.asarray(scores, dtype=np.float64), np.asarray(locations, dtype=np.float64)
        if len(knots[0]) != len(knots[1]) or not len(knots[0]) or len(residuals) != len(SHARES):
            raise ValueError(f"a torn calibration: {len(scores)} scores, {len(locations)} locations")
        rows = (*knots, np.asarray(residuals, dtype=np.float64))
        if any(not np.isfinite(row).all() or (np.diff(row) < 0).any() for row in rows):
            raise ValueError("a calibration has finite, ascending numbers")
        if not 0 <= slope < np.inf:
            raise ValueError(f"a calibration has no slope of {slope}")
        self._scores, self._locations, self._residuals = rows
        self._slope = slope

    @classmethod
    def fit(cls, scores: Floats, known: Pairs) -> Calibration:
        """Of prompts that the scores were not trained on.

        Args:
            scores: float64[P].
            known: The same P prompts.
        """
        from scipy.optimize import isotonic_regression  # loads for a second

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
        """float64[B], expected log length at each score."""
        inner = np.clip(scores, self._scores[0], self._scores[-1])
        return np.interp(inner, self._scores, self._locations) + self._slope * (scores - inner)

    def quantile(self, scores: Floats, share: float) -> Floats:
        """float64[B], tokens that so large a share of responses at each score does not exceed."""
        return np.exp(self.location(scores) + np.interp(share, SHARES, self._residuals))

    def mean(self, scores: Floats) -> Floats:
        """float64[B], expected tokens of a response at each score."""
        return np.exp(self.location(scores)) * np.exp(self._residuals).mean()

    def state_dict(self) -> dict[str, Any]:
        """Plain, for JSON."""
        rows = {"scores": self._scores, "locations": self._locations, "residuals": self._residuals}
        return {**{name: row.tolist() for name, row in rows.items()}, "slope": self._slope}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Calibration:
        """Of what :meth:`state_dict` gave.

        Raises:
            ValueError: It is none.
        """
        try:
            scores, locations, residuals = (
                np.array(state[name], dtype=np.float64) for name in ("scores", "locations", "residuals")
            )
            return cls(scores, locations, residuals, float(state["slope"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no calibration: {error}") from error
