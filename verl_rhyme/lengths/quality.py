"""How good forecasts of lengths were, once the lengths are known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from verl_rhyme.lengths.predictor import Learnt

Floats = npt.NDArray[np.float64]

#: Shares of the longest responses that a forecast is to find (StreamRL, arXiv:2504.15930, reports these).
TAILS = (0.05, 0.1, 0.2)
#: Quantiles that are held against what came.
QUANTILES = (0.1, 0.5, 0.9)
#: Samples that are kept, the latest ones.
_KEPT = 65536


class Quality:
    """Collects groups, each with what was forecast before it began, and tells how good that was."""

    def __init__(self) -> None:
        self._groups: list[tuple[Floats, ...]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, learnt: Learnt) -> None:
        """A group. What was cut short counts with the tokens it has."""
        forecast, lengths = learnt.forecast, learnt.tokens.astype(np.float64)
        quantiles = forecast.quantile(np.array(QUANTILES)[:, None])
        covered = (lengths <= quantiles).astype(np.float64)
        alike = quantiles[QUANTILES.index(0.5)], forecast.seen, forecast.mean(), [learnt.ranked]
        median, seen, mean, ranked = np.repeat(np.array(alike, dtype=np.float64), len(lengths), axis=1)
        self._groups.append((median, lengths, covered, seen, mean, ranked))
        self._count += len(lengths)
        while self._count - len(self._groups[0][1]) >= _KEPT:
            self._count -= len(self._groups.pop(0)[1])

    def take(self) -> dict[str, float]:
        """Of all since the last call: the :func:`measures` of the medians; ``coverage_10``, ``_50`` and ``_90``, shares
        of responses that were no longer than that quantile; ``mean_ratio``, expected length over length; ``seen``, the
        share of which anything was known, and ``ranked``, that of which it was known by a ranker's word. Empty when
        there was nothing."""
        if not self._groups:
            return {}
        columns = (np.concatenate([group[i] for group in self._groups]) for i in (0, 1, 3, 4, 5))
        predicted, lengths, seen, mean, ranked = columns
        covered = np.concatenate([group[2] for group in self._groups], axis=1).mean(axis=1)
        self._groups, self._count = [], 0
        return {
            **measures(predicted, lengths),
            "mean_ratio": float(mean.mean() / lengths.mean()),
            **{f"coverage_{round(100 * q)}": float(c) for q, c in zip(QUANTILES, covered, strict=True)},
            "seen": float(seen.mean()),
            "ranked": float(ranked.mean()),
        }


def measures(predicted: Floats, lengths: Floats) -> dict[str, float]:
    """How well predictions rank lengths.

    Args:
        predicted: float64[N].
        lengths: float64[N].

    Returns:
        ``rank_correlation`` (Spearman's; 0 where one of them is constant), ``recall_5``, ``recall_10`` and
        ``recall_20`` (:func:`tail_recall`).
    """
    recalls = {f"recall_{round(100 * share)}": tail_recall(predicted, lengths, share) for share in TAILS}
    return {"rank_correlation": rank_correlation(predicted, lengths), **recalls}


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
