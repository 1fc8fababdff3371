"""Our spans reach RL-Insight through verl's logger as installed; the package itself, an option, is a stand-in."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from verl.utils.tracking import RLInsightLogger

from verl_rhyme.trainer.insight import Insight


@pytest.fixture
def spans(monkeypatch) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []
    module = SimpleNamespace(__version__="0.3.0", init=lambda **_: None, trace_span=lambda **span: sent.append(span))
    monkeypatch.setitem(sys.modules, "rl_insight", module)
    monkeypatch.setenv(RLInsightLogger.ENABLE_ENV, "1")
    monkeypatch.setattr(RLInsightLogger, "_rl_insight_module", None)
    monkeypatch.setattr(RLInsightLogger, "_init_done", False)
    return sent


def rows(rng: np.random.Generator, offset: float) -> list[dict[str, Any]]:
    started = offset + rng.random(40) * 10
    return [
        {"prompt_key": "ab", "sample": k, "replica": k % 2, "started_at": s, "finished_at": s + 3 * rng.random()}
        for k, s in enumerate(started)
    ]


def test_each_request_and_stage_is_a_span_and_none_lies_over_another(spans) -> None:
    rng, insight = np.random.default_rng(0), Insight()
    insight.requests([*rows(rng, 1e9), {**rows(rng, 1e9)[0], "finished_at": math.nan}], step=1)
    insight.requests(rows(rng, 1e9 + 5), step=2)  # began before the others had ended
    insight.stages([("gen", 1e9, 2.0), ("step", 1e9, 5.0), ("gen", 1e9 + 2.0, 0.0)], step=1)
    assert len(spans) == 40 + 40 + 2
    lanes = defaultdict(list)
    for span in spans:
        lanes[span["attributes"]["state_lane_id"]].append((span["start_time_ns"], span["end_time_ns"]))
    assert {lane.partition("/")[0] for lane in lanes} == {"replica_0", "replica_1", "trainer"}
    assert all(a[1] <= b[0] for times in lanes.values() for a, b in pairwise(sorted(times)))
    assert all(isinstance(v, str | int | float | bool) for span in spans for v in span["attributes"].values())


def test_without_it_nothing_is_sent(spans, monkeypatch) -> None:
    monkeypatch.delenv(RLInsightLogger.ENABLE_ENV)
    Insight().requests(rows(np.random.default_rng(0), 0.0), step=1)
    assert spans == []
