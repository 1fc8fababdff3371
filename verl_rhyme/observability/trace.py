"""Trace of a run as Chrome trace JSON for Perfetto: a process per replica with a lane per slot, and one process with
the trainer's stages."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def write(path: Path, requests: Mapping[str, np.ndarray], stages: Mapping[str, np.ndarray]) -> None:
    """Write the trace file, an event per line, from columns of ``events.REQUESTS`` and ``events.STAGES``."""
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for at, event in enumerate(spans(requests, stages)):
            file.write((",\n" if at else "") + json.dumps(event, allow_nan=False))
        file.write("\n]}\n")


def spans(requests: Mapping[str, np.ndarray], stages: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """Yield the trace events: names of processes and lanes, and complete spans in whole microseconds from the first
    one.

    Spans without a duration are left out, and spans of a lane do not overlap. Processes and lanes are numbered from 1;
    no two lanes share a number, even in different processes: Perfetto takes them for threads of one machine.
    """
    ran = np.isfinite(requests["started_at"]) & np.isfinite(requests["finished_at"])
    rows = np.flatnonzero(ran & (requests["finished_at"] > requests["started_at"]))
    timed = np.flatnonzero(np.isfinite(stages["started_at"]) & (stages["duration_s"] > 0))
    began = np.concatenate([requests["started_at"][rows], stages["started_at"][timed]])
    ended = np.concatenate([requests["finished_at"][rows], (stages["started_at"] + stages["duration_s"])[timed]])
    start, end = (np.floor(1e6 * (times - began.min(initial=np.inf))).astype(np.int64) for times in (began, ended))
    replica = requests["replica"][rows]
    trainer = int(replica.max(initial=0)) + 1
    process = np.concatenate([replica, np.full(len(timed), trainer)])
    lane = 1
    for pid, number in enumerate(np.unique(process).tolist(), 1):
        mine = np.flatnonzero(process == number)
        lanes = lane + assign_lanes(start[mine], end[mine])
        yield _named("process_name", pid, lane, "trainer" if number == trainer else f"replica {number}")
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": lane, "ts": 0, "args": {"sort_index": pid}}
        for slot in range(int(lanes.max()) - lane + 1 if number != trainer else 0):
            yield _named("thread_name", pid, lane + slot, f"slot {slot}")
        for at, tid in zip(mine.tolist(), lanes.tolist(), strict=True):
            described = _request(requests, rows[at]) if number != trainer else _stage(stages, timed[at - len(rows)])
            span = {"ph": "X", "pid": pid, "tid": tid, "ts": int(start[at]), "dur": int(end[at] - start[at])}
            yield {**span, "name": described[0], "args": described[1]}
        lane = int(lanes.max()) + 1


def assign_lanes(began: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Return the free lane with the lowest number for each span, int64[N], as an engine assigns slots."""
    lanes = np.zeros(len(began), dtype=np.int64)
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (end, lane)
    for at in np.lexsort((ended, began)).tolist():
        while busy and busy[0][0] <= began[at]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lanes[at] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (ended[at].item(), int(lanes[at])))
    return lanes


def _request(requests: Mapping[str, np.ndarray], row: int) -> tuple[str, dict[str, Any]]:
    key = requests["prompt_key"][row]
    prompt = key.hex() if isinstance(key, bytes) else "?"
    counts = ("step", "sample", "request", "prompt_tokens", "response_tokens", "accepted_tokens", "drafted_tokens")
    details: dict[str, Any] = {name: int(requests[name][row]) for name in counts}
    details |= {name: bool(requests[name][row]) for name in ("trained", "validate")}
    details |= {"prompt": prompt, "ended": str(requests["stop_reason"][row] or "?")}
    if reason := requests["reason"][row]:
        details["placed_by"] = str(reason)
    if predicted := int(requests["predicted_tokens"][row]):
        details["predicted_tokens"] = predicted
    queued = requests["started_at"][row] - requests["queued_at"][row]
    if np.isfinite(queued):
        details["queued_s"] = round(float(queued), 6)
    return f"{prompt[:8]}-{details['sample']}", details


def _stage(stages: Mapping[str, np.ndarray], row: int) -> tuple[str, dict[str, Any]]:
    details = {name: int(stages[name][row]) for name in ("step", "epoch")}
    return f"{stages['stage'][row]} {details['step']}", details


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
