"""Step metrics compared with brute force, and the staleness of a batch by group and by token."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.observability import metrics as m
from verl_rhyme.observability.alarms import WINDOW, AcceptanceAlarm
from verl_rhyme.observability.batches import batch_metrics
from verl_rhyme.scheduling.attempts import AttemptReport
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules, Unit

intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=20)


def brute_force(spans: list[tuple[int, int]], slots: int) -> float:
    """Compute the bubble ratio by its definition, second by second, from whole seconds."""
    begin, end = min(a for a, _ in spans), max(b for _, b in spans)
    idle = 0
    for second in range(begin, end):
        running = sum(a <= second < b for a, b in spans)
        idle += slots - min(running, slots)
    return idle / (slots * (end - begin)) if end > begin else 0.0


@given(intervals, st.integers(1, 25))
def test_bubble_ratio_agrees_with_its_definition(pairs: list[tuple[int, int]], slots: int) -> None:
    spans = [(min(p), max(p)) for p in pairs]
    started, finished = np.array(spans, dtype=np.float64).T
    ratio = m.bubble_ratio(started, finished, slots)
    assert ratio == pytest.approx(brute_force(spans, slots), abs=1e-9)
    assert m.bubble_ratio([*started, np.nan], [*finished, 99.0], slots) == pytest.approx(ratio), "it never ran"
    # Neither the clock's zero nor its unit matters.
    assert m.bubble_ratio(started * 1e-3 + 1.7e9, finished * 1e-3 + 1.7e9, slots) == pytest.approx(ratio, abs=1e-4)


COLUMNS = {
    "uid": np.array(["a", "a", "b"]),
    "sample": np.array([0, 1, 0]),
    "stop_reason": np.array(["completed"] * 3),
    "queued_at": np.array([0.0, 0.0, 0.0]),
    "started_at": np.array([0.0, 1.0, 2.0]),
    "finished_at": np.array([4.0, 5.0, 10.0]),
    "response_tokens": np.array([10, 20, 70]),
    "drafted_tokens": np.array([0, 10, 40]),
    "accepted_tokens": np.array([0, 5, 40]),
    "verify_steps": np.array([0, 5, 10]),
    "reverified_tokens": np.array([0, 3, 7]),
    "by_source": np.array(
        [[[0, 0]] * 5, [[0, 0], [0, 0], [2, 0], [9, 1], [0, 0]], [[0, 0], [0, 0], [3, 0], [0, 2], [0, 0]]]
    ),
    "draft_errors": np.array([0, 2, 0]),
    "draft_seconds": np.array([0.0, 0.5, 0.25]),
    "engine_steps": np.array([0, 40, 40]),
    "waiting_steps": np.array([0, 10, 30]),
    "history_hit": np.array([False, True, True]),
    "trained": np.array([True, True, False]),
}
METRICS = {
    **{m.REQUESTS: 3, m.TRAINED_TOKENS: 30, m.USEFUL_TOKENS_PER_S: 3.0, m.QUEUE_S_MEAN: 1.0, m.QUEUE_S_MAX: 2.0},
    **{m.LENGTHS_P50: 20.0, m.LENGTHS_P90: 60.0, m.LENGTHS_P99: 69.0, m.LENGTHS_MAX: 70.0},
    **{m.SPEC_DRAFTED: 50, m.SPEC_ACCEPTED: 45, m.SPEC_VERIFY_STEPS: 15, m.SPEC_REVERIFIED: 10},
    **dict.fromkeys(chain(*m.SPEC_SOURCES.values()), 0.0),
    **{"rollout/spec/drafted/own": 5, "rollout/spec/drafted/others": 9, "rollout/spec/accepted/others": 3},
    m.SPEC_ACCEPT_RATE: (0 + 0.5 + 1.0) / 3,
    m.SPEC_ACCEPT_LENGTH: (0 + 2.0 + 5.0) / 3,
    **{m.SPEC_ERRORS: 2, m.SPEC_DRAFT_S: 0.75, m.SPEC_WAITING: 0.5, m.HISTORY_HIT_RATE: 2 / 3},
}


def test_step_metrics() -> None:
    data = m.step_metrics(COLUMNS, slots=2, rollout_s=10.0)
    assert data == pytest.approx({**METRICS, m.BUBBLE_RATIO: brute_force([(0, 4), (1, 5), (2, 10)], 2)})
    assert all(type(value) is float for value in data.values())
    skewed = {**COLUMNS, "finished_at": COLUMNS["finished_at"] - 3.5}
    assert 0.0 <= m.step_metrics(skewed, slots=2, rollout_s=10.0)[m.BUBBLE_RATIO] <= 1.0, "clocks of two nodes"
    assert m.step_metrics(COLUMNS, slots=None, rollout_s=10.0) == pytest.approx(METRICS)
    assert m.bubble_ratio([], [], 4) == 0.0


def test_response_tokens_without_what_verl_logs() -> None:
    assert m.response_tokens({m.TRAINED_TOKENS: 5.0}) == 5
    verls = {m.GEN_S: 2.0, m.GEN_MS_PER_TOKEN: 10.0, m.TURNS_MAX: 2}
    assert m.response_tokens({**verls, m.TRAINED_TOKENS: 5.0}) == 5, "verl counts the tokens of tools, too"
    assert m.response_tokens(verls) == 200
    assert m.response_tokens({**verls, m.TURNS_MAX: 4}) is None
    assert m.response_tokens({m.GEN_S: 2.0, m.RESPONSE_LENGTH_MEAN: float("nan")}) is None


def test_the_alarm_warns_once_and_is_active_until_a_token_is_accepted() -> None:
    alarm = AcceptanceAlarm()

    def observe(drafted: int, accepted: int) -> tuple[bool, bool]:
        return alarm.observe({m.SPEC_DRAFTED: drafted, m.SPEC_ACCEPTED: accepted}) is not None, alarm.active

    assert (alarm.observe({}), observe(0, 0)) == (None, (False, False)), "no drafts"
    seen = [observe(*step) for step in ((WINDOW - 1, 0), (1, 0), (WINDOW, 0), (10, 1), (WINDOW, 0))]
    assert seen == [(False, False), (True, True), (False, True), (False, False), (True, True)]


def record(name: str, tokens: int, version: int) -> dict[str, Any]:
    times = {"started_at": 0.0, "finished_at": 1.0}
    return {"id": f"{name}/{version}", "response_tokens": tokens, "policy_version_end": version, **times}


def crossing(unit: Unit) -> dict[str, float]:
    """Return metrics of two groups. One sample of the first group spans two versions (30 tokens before, 10 after); the
    three other samples have 10 tokens of the policy that is trained."""
    rules = Rules(batch_prompts=2, batch_samples=4, max_staleness=1, unit=unit, separate=True)
    rollout = Rollout(rules)
    rollout.publish(0, None)
    rollout.add_prompts([("a", 2), ("b", 2)])
    (first,) = rollout.fill(1)
    rollout.ended(AttemptReport(first.attempt, "interrupted", 30, 0, [record(first.attempt.name, 30, 0)]))
    rollout.publish(1, None)
    for start in rollout.fill():
        crossed = start.predecessor is not None
        records = [*([record(first.attempt.name, 30, 0)] if crossed else []), record(start.attempt.name, 10, 1)]
        rollout.ended(AttemptReport(start.attempt, "generated", 40 if crossed else 10, 0 if crossed else 1, records))
        rollout.ended(AttemptReport(start.attempt, "finished"))
    data = batch_metrics(rollout.take(), slots=4)
    return {name.removeprefix("training/staleness/"): v for name, v in data.items() if "staleness" in name}


def test_a_group_is_as_stale_as_its_oldest_token() -> None:
    tokens = {"tokens/mean": 30 / 70, "tokens/max": 1.0}
    assert crossing("group") == pytest.approx({"mean": 0.5, "max": 1.0, "groups": 2.0, **tokens})
    assert crossing("trajectory") == pytest.approx({"mean": 0.25, "max": 1.0, "groups": 4.0, **tokens})
