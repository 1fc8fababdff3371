"""Where a prompt's lengths lie, from those of its responses that ended and those that are still longer.

Log lengths of a prompt's responses are taken for draws around its location. Of a response that still runs, or was cut
short, it is known only that it is longer than what it has (a censored draw: Tobin, Econometrica 1958). Leaving these
out would be wrong, not only wasteful: of responses that run side by side the shortest are known first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

#: Of Newton's method on a concave function of one variable, from a good beginning.
_ITERATIONS = 8


def hazard(z: Floats) -> Floats:
    """Of the standard normal: density over survival, at each ``z``."""
    with np.errstate(over="ignore", divide="ignore"):
        return np.sqrt(2 / np.pi) / erfcx(z / np.sqrt(2))


def posterior(
    location: Floats, variance: Floats, noise: Floats, draws: Floats, ended: npt.NDArray[np.bool_], of: Indices
) -> tuple[Floats, Floats]:
    """Locations once draws around them are known: the mode, and the curvature there.

    Args:
        location: float64[G], of each prompt before.
        variance: float64[G], of that; positive.
        noise: float64[G], variance of a draw around the location; positive.
        draws: float64[N], log lengths, of those that have not ended so far.
        ended: bool[N].
        of: int64[N], index of the prompt each draw belongs to.

    Returns:
        float64[G] and float64[G]: location and its variance.
    """
    count, at = len(location), location.copy()
    scale = np.sqrt(noise)
    done, rest = of[ended], of[~ended]
    number = np.bincount(done, minlength=count)
    total = np.bincount(done, draws[ended], minlength=count)
    bounds, spread = draws[~ended], scale[rest]
    curvature = 1 / variance + number / noise
    for _ in range(_ITERATIONS):
        slope = (location - at) / variance + (total - number * at) / noise
        curvature = 1 / variance + number / noise
        if len(rest):
            z = (bounds - at[rest]) / spread
            pull = hazard(z)
            slope += np.bincount(rest, pull / spread, minlength=count)
            curvature += np.bincount(rest, pull * (pull - z) / noise[rest], minlength=count)
        step = slope / curvature
        at = at + step
        if not len(rest) or np.abs(step).max(initial=0.0) < 1e-9:
            break
    return at, 1 / curvature
