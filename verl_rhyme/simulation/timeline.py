"""A simulated run as Chrome trace JSON, which Perfetto opens: a process for each replica, a lane for each slot."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from verl_rhyme.simulation.engine import Segment
from verl_rhyme.simulation.run import Step

_TRAINER = "trainer"


def trace(segments: Iterable[tuple[str, Segment]], steps: Sequence[Step]) -> dict[str, Any]:
    """Events in the format of ``chrome://tracing``, times in microseconds.

    Args:
        segments: Stretches of requests in slots, with their replica's name.
        steps: Of the trainer's lane.
    """
    by_replica: dict[str, list[Segment]] = {}
    for replica, segment in segments:
        by_replica.setdefault(replica, []).append(segment)
    names = [*by_replica, _TRAINER]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for pid, name in enumerate(names)
    ]
    for pid, replica in enumerate(by_replica):
        free: list[int] = []
        busy: list[tuple[float, int]] = []
        for segment in sorted(by_replica[replica], key=lambda s: (s.began, s.ended)):
            while busy and busy[0][0] <= segment.began:
                heapq.heappush(free, heapq.heappop(busy)[1])
            lane = heapq.heappop(free) if free else len(busy)
            heapq.heappush(busy, (segment.ended, lane))
            request = segment.request
            about = {"prompt": str(request.prompt), "tokens": round(segment.emitted), "ended": segment.why}
            events.append(_span(pid, lane, str(request.name), segment.began, segment.ended, about))
    for step in steps:
        about = {"tokens": step.tokens, "bubble": round(step.bubble, 4), "staleness": step.staleness}
        events.append(_span(len(names) - 1, 0, f"rollout {step.version}", step.began, step.harvested, about))
        events.append(_span(len(names) - 1, 0, f"update {step.version}", step.harvested, step.ended, about))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _span(pid: int, lane: int, name: str, began: float, ended: float, about: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": lane,
        "ts": round(1e6 * began, 3),
        "dur": round(1e6 * (ended - began), 3),
        "args": about,
    }
