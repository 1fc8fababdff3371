"""Calibration of a ranker: a line from scores to log lengths, by prompts with known lengths.

A loss on ranks determines the order of scores, not their scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_rhyme.lengths.pairs import Pairs

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """Line from scores to log lengths; the slope is not negative."""

    slope: float
    intercept: float

    @classmethod
    def fit(cls, scores: Floats, known: Pairs) -> Calibration:
        """Return the calibration of float64[P] scores of P prompts that the ranker was not trained on."""
        weights = np.array([len(lengths) for lengths in known.lengths], dtype=np.float64)
        slope, intercept = fit_line(scores, known.locations, weights)
        return cls(slope, intercept) if slope > 0 else cls(0.0, float(np.average(known.locations, weights=weights)))

    def location(self, scores: Floats) -> Floats:
        """Return float64[B], expected log length at each score."""
        return self.intercept + self.slope * scores

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Calibration:
        """Return the calibration of saved attributes, or of the steps that earlier versions saved.

        Raises:
            ValueError: The state is incomplete or invalid.
        """
        try:
            if "scores" in state:
                scores, locations = np.array(state["scores"], np.float64), np.array(state["locations"], np.float64)
                return cls(*fit_line(scores, locations, np.ones(len(scores))))
            made = cls(float(state["slope"]), float(state["intercept"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no calibration: {error}") from error
        if not np.isfinite([made.slope, made.intercept]).all():
            raise ValueError(f"a calibration needs finite numbers: {state}")
        return made


def fit_line(x: Floats, y: Floats, weights: Floats) -> tuple[float, float]:
    """Return slope and intercept by weighted least squares; slope 0 where all ``x`` are equal."""
    if np.ptp(x) < 1e-9:
        return 0.0, float(np.average(y, weights=weights))
    slope, intercept = np.polyfit(x, y, 1, w=np.sqrt(weights))
    return float(slope), float(intercept)
