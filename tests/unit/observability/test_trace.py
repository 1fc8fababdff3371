"""Trace for Perfetto: its spans do not overlap, and its ids are unique."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.observability import trace
from verl_rhyme.observability.events import EventLog, read_requests, read_stages, to_numpy

durations = st.tuples(st.floats(0, 10), st.floats(0.001, 3))
requests_drawn = st.lists(st.tuples(st.integers(0, 2), durations), min_size=1, max_size=40)
stages_drawn = st.lists(st.tuples(st.sampled_from(["step", "gen", "update_actor"]), durations), max_size=10)


def events_of(requests, stages):
    """Return the trace events of (replica, (start, seconds)) and (stage, (start, seconds))."""
    replicas, times = zip(*requests, strict=True)
    began, lasts = (np.array(column) for column in zip(*times, strict=True))
    columns = {"replica": replicas, "started_at": 1.7e9 + began, "finished_at": 1.7e9 + began + lasts}
    first = np.arange(len(requests)) == 0
    placed = {"reason": np.where(first, "x", ""), "predicted_tokens": np.where(first, 0, 1)}
    timed = {"stage": [name for name, _ in stages], "duration_s": [seconds for _, (_, seconds) in stages]}
    with tempfile.TemporaryDirectory() as folder:
        log = EventLog(folder)
        log.append_requests(1, 0, {**columns, **placed})
        log.append_stages(1, 0, {**timed, "started_at": [1.7e9 + at for _, (at, _) in stages]})
        return list(trace.spans(*(to_numpy(read(folder)) for read in (read_requests, read_stages))))


@given(requests_drawn, stages_drawn)
def test_the_trace_is_valid(requests, stages) -> None:
    spans, owners, names = defaultdict(list), defaultdict(set), {}
    for event in events_of(requests, stages):
        assert all(isinstance(event[key], int) and event[key] >= 0 for key in ("pid", "tid", "ts"))
        assert min(event["pid"], event["tid"]) > 0, "Perfetto takes 0 for the idle thread of all processes"
        owners[event["tid"]].add(event["pid"])
        if event["ph"] == "X":
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
            spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["name"] == "process_name":
            names[event["pid"]] = event["args"]["name"]
    assert all(len(pids) == 1 for pids in owners.values()), "Perfetto takes lanes for threads of one machine"
    replicas = {replica for replica, _ in requests}
    assert sorted(names.values()) == sorted([*(f"replica {k}" for k in replicas), *(["trainer"] if stages else [])])
    assert sum(map(len, spans.values())) == len(requests) + len(stages)
    for mine in spans.values():
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(mine))), "spans overlap"


def test_a_request_shows_why_it_was_placed() -> None:
    first, second = (event["args"] for event in events_of([(0, (0.0, 1.0)), (0, (2.0, 1.0))], []) if event["ph"] == "X")
    assert ("placed_by" in first, "placed_by" in second) == (True, False)
    assert ("predicted_tokens" in first, second["predicted_tokens"]) == (False, 1), "0 means no prediction"
