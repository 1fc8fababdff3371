"""Layout of time spans in lanes without overlap."""

from __future__ import annotations

import heapq

import numpy as np


def pack(
    began: np.ndarray, ended: np.ndarray, most: float = np.inf, overlap: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Assign each span to the free lane with the lowest number, as an engine assigns slots.

    An engine reuses a slot shortly before the last response has left it. So, if all lanes are taken, a span may start
    in the lane that becomes free next and truncate the span in it.

    Args:
        began, ended: Seconds, float64[N].
        most: Number of lanes from which on spans may be truncated.
        overlap: Most seconds by which a span is truncated.

    Returns:
        Lanes, int64[N], from 0, and the ends after truncation, float64[N].
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
