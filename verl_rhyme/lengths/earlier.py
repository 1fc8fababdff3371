"""Remaining tokens of a response, by the lengths of earlier responses to its prompt.

A response with e tokens is compared with its prompt's earlier responses longer than e. Its remaining tokens are the
mean of their tokens beyond e (mean excess, or mean residual life). If it is longer than all of them, it is expected to
add half of its tokens: the mean excess of a Pareto tail with index 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Number of the latest responses of a prompt that are kept.
LATEST = 64


class EarlierLengths:
    """Lengths of earlier responses, in rows; a row is a running request or a prompt, as the caller chooses.

    A state machine.

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
        known, counts = self._lengths[rows], self._counts[rows]
        longer = (np.arange(LATEST) < counts[:, None]) & (known > emitted[:, None])
        count, excess = longer.sum(axis=1), np.where(longer, known - emitted[:, None], 0).sum(axis=1)
        beyond = np.where(counts > 0, 0.5 * emitted, np.nan)
        return np.where(count > 0, excess / np.maximum(count, 1), beyond)
