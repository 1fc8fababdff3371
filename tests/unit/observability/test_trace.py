"""Trace for Perfetto: its spans do not overlap, and its ids are unique."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.observability import trace

durations = st.tuples(st.floats(0, 10), st.floats(0.001, 3))
requests_drawn = st.lists(st.tuples(st.integers(0, 2), durations), min_size=1, max_size=40)
stages_drawn = st.lists(st.tuples(st.sampled_from(["step", "gen", "update_actor"]), durations), max_size=10)


def events_of(requests, stages):
    """Return the trace events of (replica, (start, seconds)) and (stage, (start, seconds))."""
    n = len(requests)
    counts = ("step", "sample", "request", "prompt_tokens", "response_tokens", "accepted_tokens", "drafted_tokens")
    columns = {
        **{name: np.arange(n) for name in (*counts, "predicted_tokens")},
        "replica": np.array([replica for replica, _ in requests]),
        "queued_at": np.full(n, 1.7e9),
        "started_at": 1.7e9 + np.array([at for _, (at, _) in requests]),
        "finished_at": 1.7e9 + np.array([at + lasts for _, (at, lasts) in requests]),
        "prompt_key": np.array([bytes(15) + bytes([k]) for k in range(n)] + [None], dtype=object)[:n],
        **{name: np.array(["x", *[""] * (n - 1)], dtype=object) for name in ("stop_reason", "reason")},
        **{name: np.ones(n, dtype=bool) for name in ("trained", "validate")},
    }
    timed = {
        "stage": np.array([name for name, _ in stages], dtype=object),
        "started_at": 1.7e9 + np.array([at for _, (at, _) in stages]),
        "duration_s": np.array([lasts for _, (_, lasts) in stages]),
        **{name: np.zeros(len(stages), dtype=int) for name in ("step", "epoch")},
    }
    return list(trace.spans(columns, timed))


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
