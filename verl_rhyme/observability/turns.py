"""Turns of samples that call tools, from request records alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from verl_rhyme.scheduling.attempts import ABORTED

Array = npt.NDArray[Any]

#: Columns that :func:`turns` reads.
COLUMNS = ("uid", "sample", "trained", "queued_at", "finished_at", "stop_reason")


class Turns(NamedTuple):
    """Times between two turns, in which a sample has no request: its tools, and what else its agent loop does."""

    before: Array  # row of the request that the sample finished, int64[k]
    after: Array  # row of its next one, int64[k]
    left: Array  # when it finished its last request, seconds, float64[k]
    back: Array  # when it sent the next one, float64[k]
    lives: Array  # seconds from each sample's first request to the end of its last, float64[S]


def turns(requests: Mapping[str, Array]) -> Turns:
    """Find the turns of samples in :data:`COLUMNS` of ``events.REQUESTS``, [N], in any order and with finite times.

    Attempts that were trained are kept apart from those that were not.
    """
    numbers: dict[Any, int] = {}
    prompts = np.array([numbers.setdefault(uid, len(numbers)) for uid in requests["uid"].tolist()], dtype=np.int64)
    queued, finished = (requests[name].astype(np.float64) for name in ("queued_at", "finished_at"))
    order = np.lexsort((queued, requests["trained"], requests["sample"], prompts))
    labels = np.stack([prompts, requests["sample"], requests["trained"]])[:, order]
    first = np.append(True, np.any(labels[:, 1:] != labels[:, :-1], axis=0))[: len(order)]
    # The latest end so far in each sample: an offset by sample keeps those before it out of the maximum.
    offset = (np.cumsum(first) - 1) * (np.ptp(finished) + 1.0 if len(order) else 0.0)
    reached = np.maximum.accumulate(finished[order] + offset) - offset
    before, after, left, back = order[:-1], order[1:], reached[:-1], queued[order][1:]
    kept = ~first[1:] & (back >= left) & ~np.isin(requests["stop_reason"][before], ABORTED)
    last = np.append(first[1:], True)[: len(order)]
    return Turns(before[kept], after[kept], left[kept], back[kept], reached[last] - queued[order][first])
