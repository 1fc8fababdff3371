"""How far lengths fall from what was forecast: the shape that all forecasts share.

A residual is ``z = (log length - location) / scale``. Lengths have no tail that a formula would fit for every task, so
their distribution is counted: a product-limit estimate (Kaplan and Meier, JASA 1958) over bins, in which a response
that was cut short counts as longer than what it had (censored). It begins as a standard normal and forgets slowly, but
never the normal: where nothing came lately, it goes on as that does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

Floats = npt.NDArray[np.float64]

#: Of the bins. Beyond the last one the hazard stays what it is there for a normal.
EDGES: Floats = np.linspace(-6, 6, 241)
_BEYOND = 6.0
#: Residuals that the normal counts for.
_PRIOR = 32.0
#: Residuals after which one counts 1/e.
_MEMORY = 8192


#: Of these, in each bin and beyond the last.
_NORMAL = _PRIOR * np.diff(ndtr(EDGES))
_NORMAL[0] += _PRIOR * ndtr(EDGES[0])
_LONGER = float(_PRIOR * ndtr(-EDGES[-1]))


class Residuals:
    """The distribution of residuals, by its cumulative hazard ``H(z) = -log P(Z > z)``."""

    def __init__(self) -> None:
        self._ended, self._longer = _NORMAL.copy(), _LONGER
        self._cut = np.zeros_like(self._ended)
        self._hazard: Floats | None = None

    def add(self, residuals: Floats, ended: npt.NDArray[np.bool_]) -> None:
        """Count residuals.

        Args:
            residuals: float64[n].
            ended: bool[n], false for a response that was cut short.
        """
        kept = np.exp(-len(residuals) / _MEMORY)
        bins = np.clip(np.searchsorted(EDGES, residuals, side="right") - 1, 0, len(EDGES) - 2)
        self._ended = kept * self._ended + (1 - kept) * _NORMAL + np.bincount(bins[ended], minlength=len(EDGES) - 1)
        self._cut = kept * self._cut + np.bincount(bins[~ended], minlength=len(EDGES) - 1)
        self._longer = kept * self._longer + (1 - kept) * _LONGER
        self._hazard = None

    def hazard(self, residuals: Floats) -> Floats:
        """H at each of them; 0 at minus infinity."""
        at_edges = self._at_edges()
        beyond = np.maximum(residuals - EDGES[-1], 0)
        return np.interp(residuals, EDGES, at_edges) + _BEYOND * beyond

    def inverse(self, hazard: Floats) -> Floats:
        """The residuals at which H has these values, at least 0 each."""
        at_edges = self._at_edges()
        beyond = np.maximum(hazard - at_edges[-1], 0)
        return np.interp(hazard, at_edges, EDGES) + beyond / _BEYOND

    def _at_edges(self) -> Floats:
        if self._hazard is None:
            leaving = self._ended + self._cut
            at_risk = leaving[::-1].cumsum()[::-1] + self._longer - self._cut / 2
            share = np.minimum(self._ended / np.maximum(at_risk, 1e-300), 1 - 1e-6)
            self._hazard = np.concatenate([[0.0], -np.log1p(-share).cumsum()])
        return self._hazard

    def state_dict(self) -> dict[str, object]:
        """Plain, for JSON."""
        return {"ended": self._ended.tolist(), "cut": self._cut.tolist(), "longer": float(self._longer)}

    def load_state_dict(self, state: dict) -> None:
        """Take up what :meth:`state_dict` gave.

        Raises:
            ValueError: It has other bins.
        """
        ended, cut = (np.array(state[name], dtype=np.float64) for name in ("ended", "cut"))
        if ended.shape != self._ended.shape or cut.shape != self._cut.shape:
            raise ValueError(f"residuals in {len(ended)} bins; expected {len(self._ended)}")
        self._ended, self._cut, self._longer, self._hazard = ended, cut, state["longer"], None
