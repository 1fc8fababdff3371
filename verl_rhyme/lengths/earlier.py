"""How much longer a response will be, by the lengths of earlier responses to its prompt.

A response that has emitted e tokens is taken for one of its prompt's earlier responses that were longer than e: what it
has to go is the mean of what they had beyond e (their mean excess, or mean residual life). One that is longer than all
of them is expected to go on for half of what it has, the mean excess of a Pareto tail with index 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Earlier responses of a prompt that tell how long the next ones will be: the latest ones.
LATEST = 64


class EarlierLengths:
    """Lengths of earlier responses, in rows: one for each running request, or for each prompt, as the caller counts.

    A state machine.

    Args:
        rows: Rows to begin with; nothing is known of any.
    """

    def __init__(self, rows: int):
        self._lengths = np.zeros((rows, LATEST), dtype=np.int32)  # ascending in each row
        self._counts = np.zeros(rows, dtype=np.int64)

    def __len__(self) -> int:
        """Rows there are."""
        return len(self._counts)

    def set(self, row: int, lengths: np.ndarray | Sequence[int]) -> None:
        """Tell what is known of a row, in place of what was.

        Args:
            row: Below ``len(self)``.
            lengths: int[m], tokens of each earlier response, oldest first; the latest :data:`LATEST` count. Empty:
                nothing is known.
        """
        latest = lengths[-LATEST:]
        known = self._lengths[row, : len(latest)]
        known[:] = latest
        known.sort()
        self._counts[row] = len(latest)

    def remaining(self, rows: np.ndarray, emitted: np.ndarray) -> np.ndarray:
        """What each response is expected to have to go; with ``emitted`` added, its final length.

        Args:
            rows: int[B], whose earlier lengths each one is predicted from; a row may stand there several times.
            emitted: int[B], tokens each has emitted; 0 before it starts.

        Returns:
            float64[B], tokens; NaN where nothing is known.

        Raises:
            IndexError: A row that is not there.
        """
        known, counts = self._lengths[rows], self._counts[rows]
        longer = (np.arange(LATEST) < counts[:, None]) & (known > emitted[:, None])
        count, excess = longer.sum(axis=1), np.where(longer, known - emitted[:, None], 0).sum(axis=1)
        beyond = np.where(counts > 0, 0.5 * emitted, np.nan)
        return np.where(count > 0, excess / np.maximum(count, 1), beyond)
