"""Remaining tokens of a response, by the lengths of earlier responses to its prompt.

A response with e tokens is compared with its prompt's earlier responses longer than e. Its remaining tokens are the
mean of their tokens beyond e (mean excess, or mean residual life). If it is longer than all of them, it is expected to
add half of its tokens: the mean excess of a Pareto tail with index 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

#: Number of the latest responses of a prompt that are kept.
LATEST = 64


class EarlierLengths:
    """Lengths of earlier responses, in rows; a row is a running request or a prompt, as the caller chooses.

    A state machine. One call of compiled code answers all rows of a batch.

    Args:
        rows: Number of rows, empty at first.
    """

    def __init__(self, rows: int):
        self._lengths = np.zeros((rows, LATEST), dtype=np.int32)  # ascending in each row
        self._counts = np.zeros(rows, dtype=np.int64)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._counts)

    def set(self, row: int, lengths: np.ndarray | Sequence[int]) -> None:
        """Replace the known lengths of a row.

        Args:
            row: Row, below ``len(self)``.
            lengths: int[m], tokens of each earlier response, oldest first; the latest :data:`LATEST` count.
        """
        latest = lengths[-LATEST:]
        known = self._lengths[row, : len(latest)]
        known[:] = latest
        known.sort()
        self._counts[row] = len(latest)

    def remaining(self, rows: np.ndarray, emitted: np.ndarray) -> np.ndarray:
        """Return the expected remaining tokens of each response.

        Args:
            rows: int[B], row of each response; rows may repeat.
            emitted: int[B], tokens of each response; 0 before it starts.

        Returns:
            float64[B], tokens; NaN for an empty row.

        Raises:
            IndexError: Unknown row.
        """
        return _remaining(self._lengths, self._counts, rows, emitted)


@njit(cache=True, nogil=True, boundscheck=True)
def _remaining(lengths, counts, rows, emitted):
    expected = np.full(len(rows), np.nan)
    for i in range(len(rows)):
        row, done = rows[i], emitted[i]
        count = counts[row]
        excess, first = 0, count  # ``first``: index of the shortest longer response
        while first > 0 and lengths[row, first - 1] > done:
            first -= 1
            excess += lengths[row, first] - done
        if first < count:
            expected[i] = excess / (count - first)
        elif count:
            expected[i] = 0.5 * done
    return expected
