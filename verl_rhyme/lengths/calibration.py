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


class Calibration:
    """A calibration; see the module.

    Args:
        scores: float64[K], ascending.
        locations: float64[K], mean log length at each score, not descending.
        slope: Log length by score, beyond the first and the last of ``scores``; not negative.

    Raises:
        ValueError: Sizes do not match, or numbers are not finite or descend.
    """

    def __init__(self, scores: Floats, locations: Floats, slope: float) -> None:
        if len(scores) != len(locations) or not len(scores):
            raise ValueError(f"an incomplete calibration: {len(scores)} scores, {len(locations)} locations")
        if any(not np.isfinite(row).all() or (np.diff(row) < 0).any() for row in (scores, locations)):
            raise ValueError("a calibration needs finite, ascending numbers")
        if not 0 <= slope < np.inf:
            raise ValueError(f"a calibration's slope must be finite and at least 0, not {slope}")
        self._scores, self._locations, self._slope = scores, locations, slope

    @classmethod
    def fit(cls, scores: Floats, known: Pairs) -> Calibration:
        """Return the calibration of float64[P] scores of P prompts that the ranker was not trained on."""
        from scipy.optimize import isotonic_regression  # the import takes a second

        order = np.argsort(scores, kind="stable")
        weight = np.array([len(lengths) for lengths in known.lengths], dtype=np.float64)[order]
        x, y = scores[order], known.locations[order]
        fitted = isotonic_regression(y, weights=weight).x
        _, step = np.unique(fitted, return_inverse=True)
        total = np.bincount(step, weight)
        centres, levels = np.bincount(step, weight * x) / total, np.bincount(step, weight * fitted) / total
        apart = x - np.average(x, weights=weight)
        spread = np.average(apart**2, weights=weight)
        slope = max(0.0, float(np.average(apart * y, weights=weight) / spread)) if spread > 1e-12 else 0.0
        return cls(centres, levels, slope)

    def location(self, scores: Floats) -> Floats:
        """Return float64[B], expected log length at each score."""
        inner = np.clip(scores, self._scores[0], self._scores[-1])
        return np.interp(inner, self._scores, self._locations) + self._slope * (scores - inner)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values for JSON."""
        return {"scores": self._scores.tolist(), "locations": self._locations.tolist(), "slope": self._slope}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Calibration:
        """Return the calibration of a :meth:`state_dict`.

        Raises:
            ValueError: The state is incomplete or invalid.
        """
        try:
            scores, locations = (np.array(state[name], dtype=np.float64) for name in ("scores", "locations"))
            return cls(scores, locations, float(state["slope"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no calibration: {error}") from error
