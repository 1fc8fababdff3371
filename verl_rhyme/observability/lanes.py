"""Spans laid out so that none lies over another."""

from __future__ import annotations

import heapq

import numpy as np


def pack(
    began: np.ndarray, ended: np.ndarray, most: float = np.inf, overlap: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """A lane for each span: the free one with the lowest number, as an engine gives slots away.

    Args:
        began, ended: Seconds, float64[N].
        most: Where so many lanes are taken, a span may begin in the one that is free next, and cut short what is there,
        overlap: by so many seconds at most. An engine gives a slot away a moment before a response has left it.

    Returns:
        Lanes, int64[N], from 0, and the ends, of which some were cut short.
    """
    lanes, ends = np.zeros(len(began), dtype=np.int64), ended.copy()
    free: list[int] = []
    busy: list[tuple[float, int, int]] = []
    for at in np.lexsort((ended, began)).tolist():
        while busy and busy[0][0] <= began[at]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            lane = heapq.heappop(free)
        elif len(busy) >= most and busy[0][0] - began[at] <= overlap:
            _, lane, before = heapq.heappop(busy)
            ends[before] = began[at]
        else:
            lane = len(busy)
        lanes[at] = lane
        heapq.heappush(busy, (ended[at].item(), lane, at))
    return lanes, ends
