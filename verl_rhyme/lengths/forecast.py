"""What is forecast of responses: for each the distribution of its final length, given the tokens it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl_rhyme.lengths.outlook import Outlook, edges
from verl_rhyme.lengths.residuals import Residuals

Floats = npt.NDArray[np.float64]

#: Equally likely lengths that a mean is taken over.
_MEAN_OVER = 32
#: Share of the possible ends that "hardly more" leaves below.
_LIKELY = 0.9


@dataclass(frozen=True)
class Forecast:
    """Distributions of the final lengths of B responses, ``exp(location + scale Z)`` tokens with Z of one of
    :attr:`shapes`, on condition that they exceed what was emitted.

    Attributes:
        location: float64[B], of the log length.
        scale: float64[B], of the log length: how unsure the forecast is. 0.3 says that most lengths are within a
            third of the median.
        emitted: int64[B], tokens that each has so far; 0 before it starts.
        seen: bool[B], whether anything was known of its prompt.
        limit: Tokens a response can have.
        shapes: Of the residuals, of responses not :attr:`seen` and of others.
    """

    location: Floats
    scale: Floats
    emitted: npt.NDArray[np.int64]
    seen: npt.NDArray[np.bool_]
    limit: int
    shapes: tuple[Residuals, Residuals]

    def __len__(self) -> int:
        return len(self.location)

    def quantile(self, share: float | Floats) -> Floats:
        """The length that so large a share of a response's possible ends does not exceed.

        Args:
            share: Between 0 and 1; one for all, float64[B], or float64[Q, 1] for Q quantiles.

        Returns:
            float64[B], or float64[Q, B].
        """
        return self._length(self._before() - np.log1p(-np.asarray(share, dtype=np.float64)))

    def mean(self) -> Floats:
        """float64[B], expected final length in tokens, the emitted ones included."""
        return self.quantile((np.arange(_MEAN_OVER)[:, None] + 0.5) / _MEAN_OVER).mean(axis=0)

    def outlook(self) -> Outlook:
        """What each may yet add."""
        bounds = edges(self.limit)
        left = np.maximum(self.limit - self.emitted, 0)
        until = np.minimum(bounds[:, None], left)  # whatever runs on ends at the limit, all at once
        hazard = self._hazard(np.maximum(self.emitted + until, 1e-9)) - self._before()
        longer = np.exp(-np.maximum(hazard, 0))
        reached = np.diff(until, axis=0) / np.diff(bounds)[:, None]
        beyond = (reached * (longer[1:] + longer[:-1]) / 2).T.astype(np.float32)
        expected, p90 = (ends.astype(np.int64) for ends in (self.mean(), self.quantile(_LIKELY)))
        return Outlook(self.limit, expected, p90, np.ascontiguousarray(beyond))

    def _before(self) -> Floats:
        """H at what was emitted."""
        return self._hazard(self.emitted)

    def _hazard(self, tokens: npt.ArrayLike) -> Floats:
        with np.errstate(divide="ignore"):
            residuals = (np.log(np.asarray(tokens, dtype=np.float64)) - self.location) / self.scale
        return self._by_shape(Residuals.hazard, residuals)

    def _by_shape(self, function: Callable[[Residuals, Floats], Floats], values: Floats) -> Floats:
        new, known = self.shapes
        if self.seen.all():
            return function(known, values)
        if not self.seen.any():
            return function(new, values)
        return np.where(self.seen, function(known, values), function(new, values))

    def _length(self, hazard: Floats) -> Floats:
        residuals = self._by_shape(Residuals.inverse, hazard)
        tokens = np.exp(np.minimum(self.location + self.scale * residuals, np.log(self.limit) + 1))
        return np.clip(tokens, np.minimum(self.emitted + 1, self.limit), self.limit)
