"""How good forecasts of lengths were, once the lengths are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Shares of the longest responses that a forecast is to find (StreamRL, arXiv:2504.15930, reports these).
TAILS = (0.05, 0.1, 0.2)
#: Samples that are kept, the latest ones.
_KEPT = 65536


class Quality:
    """Collects groups, each with what was expected before it began, and tells how good that was."""

    def __init__(self) -> None:
        self._groups: deque[tuple[Floats, ...]] = deque()
        self._count = 0

    def add(self, expected: float, lengths: Sequence[int], seen: bool, ranked: bool) -> None:
        """A group.

        Args:
            expected: Tokens of a response, before any had begun.
            lengths: Tokens that they had.
            seen: Something was known of the prompt.
            ranked: It was known by a ranker's word alone.
        """
        alike = (np.full(len(lengths), float(value)) for value in (expected, seen, ranked))
        self._groups.append((np.array(lengths, np.float64), *alike))
        self._count += len(lengths)
        while self._count - len(self._groups[0][0]) >= _KEPT:
            self._count -= len(self._groups.popleft()[0])

    def take(self) -> dict[str, float]:
        """Of all since the last call: ``rank_correlation``; ``mean_ratio``, expected length over length; ``seen``, the
        share of responses of which anything was known, and ``ranked``, that of which it was known by a ranker's word.
        Empty when there was nothing."""
        if not self._groups:
            return {}
        lengths, expected, seen, ranked = map(np.concatenate, zip(*self._groups, strict=True))
        self._groups.clear()
        self._count = 0
        return {
            "rank_correlation": rank_correlation(expected, lengths),
            "mean_ratio": float(expected.mean() / lengths.mean()),
            "seen": float(seen.mean()),
            "ranked": float(ranked.mean()),
        }


def rank_correlation(predicted: Floats, lengths: Floats) -> float:
    """Spearman's; 0 where one of them is constant."""
    if len(lengths) < 2 or not np.ptp(predicted) or not np.ptp(lengths):
        return 0.0
    return float(np.corrcoef(_ranks(predicted), _ranks(lengths))[0, 1])


def _ranks(values: Floats) -> Floats:
    """From 1; equal values share their mean. As ``scipy.stats.rankdata``, whose import takes half a second, for which
    the coordinator would start nothing and answer nobody."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]


def tail_recall(predicted: Floats, lengths: Floats, share: float) -> float:
    """Of the longest responses, the part that is among as many predicted longest.

    Where equal values lie across the bound, each counts by the chance that a draw among them takes it: siblings that
    have not begun all have one prediction.

    Args:
        predicted: float64[N].
        lengths: float64[N].
        share: Of N, that are the longest; at least one is.
    """
    top = max(1, round(share * len(lengths)))
    return float((_among(predicted, top) * _among(lengths, top)).sum() / top)


def _among(values: Floats, top: int) -> Floats:
    """Probability of each to be among the greatest ``top``."""
    bound = np.partition(values, len(values) - top)[len(values) - top]
    above, equal = values > bound, values == bound
    return above + equal * (top - above.sum()) / max(equal.sum(), 1)
