"""What responses may yet add, in cells of tokens: distributions that can be added up and multiplied."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Shares = npt.NDArray[np.float32]

#: Into which the tokens up to the limit are cut; their width grows with the tokens.
CELLS = 32


@lru_cache(maxsize=16)
def edges(limit: int) -> Floats:
    """float64[CELLS + 1], from 0 to ``limit``: the bounds of the cells."""
    return limit * (np.arange(CELLS + 1) / CELLS) ** 2


class Outlook(NamedTuple):
    """Of B responses.

    Attributes:
        limit: Tokens a response can have; :func:`edges` of it are the cells.
        expected: int64[B], expected tokens at the end, those that are there included.
        p90: int64[B], their 90th percentile.
        beyond: float32[B, CELLS], the chance that so many tokens more are added, on average over each cell: its sum,
            weighted with the cells' widths, is what is expected to be added.
    """

    limit: int
    expected: npt.NDArray[np.int64]
    p90: npt.NDArray[np.int64]
    beyond: Shares


def certain(tokens: npt.ArrayLike, emitted: npt.ArrayLike, limit: int) -> Outlook:
    """Of responses whose lengths are known.

    Args:
        tokens: int[B], at the end.
        emitted: int[B], so far.
        limit: As :class:`Outlook` has it.
    """
    final = np.asarray(tokens, dtype=np.int64)
    bounds = edges(limit)
    left = (final - np.asarray(emitted, dtype=np.int64))[:, None]
    beyond = np.clip((left - bounds[:-1]) / np.diff(bounds), 0, 1).astype(np.float32)
    return Outlook(limit, final, final, beyond)
