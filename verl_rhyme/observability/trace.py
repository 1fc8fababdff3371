"""A run as Chrome trace JSON, which Perfetto opens: a process for each replica, a lane for each of its slots, and the
trainer's stages in a process of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verl_rhyme.observability.lanes import pack

_TRAINER = "trainer"


def write(path: Path, requests: Mapping[str, np.ndarray], stages: Mapping[str, np.ndarray]) -> None:
    """Write the file, an event a line.

    Args:
        path: Overwritten.
        requests, stages: Columns of ``events.REQUESTS`` and ``events.STAGES``.
    """
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for at, event in enumerate(spans(requests, stages)):
            file.write((",\n" if at else "") + json.dumps(event, allow_nan=False))
        file.write("\n]}\n")


def spans(requests: Mapping[str, np.ndarray], stages: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """The events: names of processes and lanes, and complete spans, in whole microseconds since the first of them.

    What never ran or took no time is left out. No two spans of a lane overlap. Numbers of processes and lanes begin at
    1, and no two lanes have the same, whatever their process: Perfetto takes them for threads of one machine.
    """
    ran = np.isfinite(requests["started_at"]) & np.isfinite(requests["finished_at"])
    rows = np.flatnonzero(ran & (requests["finished_at"] > requests["started_at"]))
    timed = np.flatnonzero(np.isfinite(stages["started_at"]) & (stages["duration_s"] > 0))
    began = np.concatenate([requests["started_at"][rows], stages["started_at"][timed]])
    ended = np.concatenate([requests["finished_at"][rows], (stages["started_at"] + stages["duration_s"])[timed]])
    origin = began.min(initial=np.inf)
    start, end = ((np.floor(1e6 * (times - origin))).astype(np.int64) for times in (began, ended))

    replicas, at_replica = np.unique(requests["replica"][rows], return_inverse=True)
    order = np.argsort(at_replica, kind="stable")
    by_replica = np.split(order, np.searchsorted(at_replica[order], np.arange(1, len(replicas))))
    first_lane = 1
    for pid, (replica, mine) in enumerate(zip(replicas.tolist(), by_replica, strict=False), 1):
        yield from _process(pid, f"replica {replica}", first_lane)
        lanes, _ = pack(start[mine], end[mine])
        for slot in range(int(lanes.max()) + 1):
            yield _named("thread_name", pid, first_lane + slot, f"slot {slot}")
        for at, lane in zip(mine.tolist(), lanes.tolist(), strict=True):
            name, about = _request(requests, int(rows[at]))
            yield _span(pid, first_lane + lane, name, int(start[at]), int(end[at]), about)
        first_lane += int(lanes.max()) + 1
    if len(timed):
        pid, first = len(replicas) + 1, len(rows)
        yield from _process(pid, _TRAINER, first_lane)
        names = stages["stage"][timed].astype(str)
        whole = names == "step"  # all else lies within it
        mine, until = start[first:], end[first:]
        lanes = np.zeros(len(timed), dtype=np.int64)
        lanes[whole], _ = pack(mine[whole], until[whole])
        lanes[~whole] = 1 + lanes.max() + pack(mine[~whole], until[~whole])[0]
        for at, lane in enumerate(lanes.tolist()):
            about = {name: int(stages[name][timed[at]]) for name in ("step", "epoch")}
            name = f"{names[at]} {about['step']}"
            yield _span(pid, first_lane + lane, name, int(start[first + at]), int(end[first + at]), about)


def _request(requests: Mapping[str, np.ndarray], row: int) -> tuple[str, dict[str, Any]]:
    key = requests["prompt_key"][row]
    prompt = key.hex() if isinstance(key, bytes) else "?"
    counts = ("step", "sample", "attempt", "prompt_tokens", "response_tokens", "accepted_tokens", "drafted_tokens")
    about: dict[str, Any] = {name: int(requests[name][row]) for name in counts}
    about |= {name: bool(requests[name][row]) for name in ("trained", "validate")}
    about |= {"prompt": prompt, "ended": str(requests["stop_reason"][row] or "?")}
    queued = requests["started_at"][row] - requests["queued_at"][row]
    if np.isfinite(queued):
        about["queued_s"] = round(float(queued), 6)
    return f"{prompt[:8]}-{about['sample']}", about


def _process(pid: int, name: str, lane: int) -> Iterator[dict[str, Any]]:
    yield _named("process_name", pid, lane, name)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": lane, "ts": 0, "args": {"sort_index": pid}}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _span(pid: int, lane: int, name: str, start: int, end: int, about: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": lane, "ts": start, "dur": end - start, "args": about}
