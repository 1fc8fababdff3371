"""Quality of length forecasts, measured once the lengths are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Number of the latest groups that are kept.
_KEPT = 1 << 15


class Quality:
    def __init__(self) -> None:
        self._groups: deque[tuple[Floats, ...]] = deque(maxlen=_KEPT)

    def add(self, expected: float, lengths: Sequence[int], seen: bool, ranked: bool) -> None:
        """Add a group of responses, each of which was expected to have ``expected`` tokens before any started.

        ``seen``: the prompt had a history or a ranker's forecast; ``ranked``: only the latter.
        """
        alike = (np.full(len(lengths), float(value)) for value in (expected, seen, ranked))
        self._groups.append((np.array(lengths, np.float64), *alike))

    def pop_metrics(self) -> dict[str, float]:
        """Return the quality of all groups since the last call; empty without any.

        ``mean_ratio`` is the expected length over the length; ``seen`` and ``ranked`` are shares of the responses.
        """
        if not self._groups:
            return {}
        lengths, expected, seen, ranked = map(np.concatenate, zip(*self._groups, strict=True))
        self._groups.clear()
        return {
            "rank_correlation": rank_correlation(expected, lengths),
            "mean_ratio": float(expected.mean() / lengths.mean()),
            "seen": float(seen.mean()),
            "ranked": float(ranked.mean()),
        }


def rank_correlation(predicted: Floats, lengths: Floats) -> float:
    """Return Spearman's rank correlation; 0 where one argument is constant."""
    if len(lengths) < 2 or not np.ptp(predicted) or not np.ptp(lengths):
        return 0.0
    return float(np.corrcoef(_ranks(predicted), _ranks(lengths))[0, 1])


def _ranks(values: Floats) -> Floats:
    """As ``scipy.stats.rankdata``, whose import would block the coordinator for half a second."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]


def tail_recall(predicted: Floats, lengths: Floats, share: float) -> float:
    """Return the part of the longest ``share`` of the responses that is among as many predicted longest.

    Equal values at the boundary count by the chance that a random draw takes each: siblings share one prediction.
    """
    top = max(1, round(share * len(lengths)))
    return float((_among(predicted, top) * _among(lengths, top)).sum() / top)


def _among(values: Floats, top: int) -> Floats:
    """Return the probability of each value to be among the greatest ``top``."""
    bound = np.partition(values, len(values) - top)[len(values) - top]
    above, equal = values > bound, values == bound
    return above + equal * (top - above.sum()) / equal.sum()
