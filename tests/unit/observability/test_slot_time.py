"""Reasons of idle slots: shares sum to one and agree with the bubble ratio, in both kinds of rollout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.observability import metrics
from verl_rhyme.observability.slot_time import OTHER, REASONS, SYNC, TAIL, TOOL, TRAINING, measure


def requests(*rows: tuple[int, int, float, float]) -> dict[str, np.ndarray]:
    """Return columns from rows of (step, replica, started, finished)."""
    step, replica, started, finished = (np.array(column) for column in zip(*rows, strict=True))
    times = {"queued_at": started, "started_at": started, "finished_at": finished}
    flags = dict.fromkeys(("validate", "trained"), np.zeros(len(step), dtype=bool))
    samples = {
        "uid": np.arange(len(step)),
        "sample": np.zeros(len(step), dtype=int),
        "stop_reason": np.array(["completed"] * len(step)),
    }
    return {"step": step, "replica": replica, **times, **flags, **samples}


def stages(*rows: tuple[int, str, float, float]) -> dict[str, np.ndarray]:
    """Return columns from rows of (step, name, begin, end)."""
    step, name, begin, end = (np.array(column) for column in zip(*rows, strict=True))
    return {"step": step, "stage": name, "started_at": begin.astype(float), "duration_s": (end - begin).astype(float)}


def steps_of(count: int) -> dict[str, np.ndarray]:
    """Return steps of 20 s from 0 on: rollout for 10 s, training for 6, weight sync for 2, other for 2."""
    rows = []
    for k in range(count):
        at = 20 * k
        parts = [("gen", 0, 10), ("old_log_prob", 10, 12), ("update_actor", 12, 16), ("update_weights", 16, 18)]
        rows += [(k + 1, name, at + begin, at + end) for name, begin, end in [*parts, ("step", 0, 20)]]
    return stages(*rows)


def test_engines_that_stop_during_training() -> None:
    """Two replicas with two slots: one starts late, and one request runs alone at the end."""
    ran = requests((1, 0, 1, 5), (1, 0, 1, 9), (1, 1, 1, 5), (1, 1, 3, 5))
    found = measure(ran, steps_of(1), 4, runs_on=False)
    assert found is not None
    seconds = dict(zip(REASONS, found.shares * 4 * 20, strict=True))
    expected = {
        "busy": 4 + 8 + 4 + 2,
        "tool": 0,
        "starved": 2,
        "tail": 3 * 4,
        "training": 24,
        "weight sync": 8,
        "other": 16,
    }
    assert seconds == pytest.approx(expected)
    assert found.shares.sum() == pytest.approx(1.0)
    assert found.bubble == pytest.approx(metrics.bubble_ratio(ran["started_at"], ran["finished_at"], 4))
    assert found.rollout_shares[[SYNC, TRAINING, OTHER]].sum() == 0
    assert found.occupied(1, np.array([0.0, 2.0, 4.0])).tolist() == [0.5, 1.5]


def test_engines_that_continue_during_training() -> None:
    """Windows last from one collection to the next; requests held back during training wait for its end."""
    ran = requests((1, 0, 0, 10), (2, 0, 12, 29), (2, 0, 20, 30))
    found = measure(ran, steps_of(2), 2, runs_on=True)
    assert found is not None
    assert [(w.began, w.ended) for w in found.windows] == [(0, 10), (10, 30)]
    first, second = found.windows
    assert (first.busy, first.idle[TAIL - 1]) == (10, 10)
    # From 10 to 12 no request has started: starved. Then starts are held until the weights arrive at 18, with the sync
    # at the end. After it the slot waits for the request that starts at 20, the last one.
    idle = dict(zip(REASONS[1:], second.idle, strict=True))
    expected = {"tool": 0, "starved": 2 * 2 + 2, "training": 4, "weight sync": 2, "tail": 1, "other": 0}
    assert idle == pytest.approx(expected)
    assert second.bubble(2) == pytest.approx(1 - (17 + 10) / 40)


def test_samples_between_two_turns_explain_idle_slots() -> None:
    """Two slots, three samples: the first calls a tool from 3 to 6 and waits until 7 for a slot; a second calls one
    from 5 to 8. A third was aborted and resumed, so its pause is no tool."""
    ran = requests((1, 0, 1, 3), (1, 0, 7, 9), (1, 1, 1, 5), (1, 1, 8, 9), (1, 1, 3, 4), (1, 1, 6, 7))
    ran["uid"] = np.array(["a", "a", "b", "b", "c", "c"])
    ran["queued_at"] = np.array([1.0, 6, 1, 8, 3, 6])
    ran["stop_reason"] = np.array(["completed"] * 4 + ["aborted", "completed"])
    found = measure(ran, steps_of(1), 2, runs_on=False)
    assert found is not None
    seconds = dict(zip(REASONS, found.shares * 2 * 20, strict=True))
    # From 4 to 5 a slot is idle, from 5 to 6 two are, from 6 to 8 one: each time a sample is in a tool. Of the second
    # at 5 to 6 both are.
    assert seconds == pytest.approx(
        {"busy": 11, "tool": 1 + 2 + 2, "starved": 0, "tail": 0, "training": 12, "weight sync": 4, "other": 8}
    )
    assert found.away(0, np.array([2.0, 4.0, 7.0])).tolist() == [0.5, 2 / 3]
    assert found.away(1, np.array([5.0, 8.0])).tolist() == [1]
    assert found.bubble == pytest.approx(metrics.bubble_ratio(ran["started_at"], ran["finished_at"], 2))
    ran["stop_reason"][:] = "aborted"
    starved = measure(ran, steps_of(1), 2, runs_on=False)
    assert starved is not None
    assert starved.shares[TOOL] == 0


times = st.tuples(
    st.integers(1, 4), st.integers(0, 2), st.floats(0, 9), st.floats(0.01, 1)
)  # step, replica, start and duration in its rollout


@given(st.lists(times, min_size=1, max_size=40), st.integers(1, 12))
def test_shares_sum_to_one_and_windows_have_the_bubble_ratio(drawn, slots) -> None:
    rows = [(step, replica, 20.0 * (step - 1) + at, 20.0 * (step - 1) + at + part) for step, replica, at, part in drawn]
    ran = requests(*rows)
    for runs_on in (True, False):
        found = measure(ran, steps_of(4), slots, runs_on)
        assert found is not None
        assert found.shares.sum() == pytest.approx(1.0)
        assert (found.shares >= -1e-12).all()
    for window in found.windows:
        mine = ran["step"] == window.step
        expected = metrics.bubble_ratio(ran["started_at"][mine], ran["finished_at"][mine], slots)
        assert window.bubble(slots) == pytest.approx(expected, abs=1e-9)


def test_clocks_of_nodes_may_differ_and_a_step_may_lack_stages() -> None:
    """Clocks by less than the training time; the third step has no stages."""
    ran = requests((1, 0, 1, 5), (1, 1, 1, 12), (2, 0, 21, 25), (2, 1, 19, 26), (3, 0, 41, 49))
    found = measure(ran, steps_of(2), 2, runs_on=False)
    assert found is not None
    assert [(w.step, w.began, w.ended) for w in found.windows] == [(1, 1, 12), (2, 19, 26), (3, 41, 49)]


def test_a_pause_between_two_starts_of_the_run_is_cut_out() -> None:
    later = 1e6
    rows = [(1, 0, 1.0, 9.0), (2, 0, 21.0 + later, 29.0 + later)]
    timed = steps_of(2)
    timed["started_at"] = timed["started_at"] + later * (timed["step"] == 2)
    found = measure(requests(*rows), timed, 1, runs_on=False)
    assert found is not None
    assert found.pauses == 1
    assert found.ended == pytest.approx(40.0)
    assert [(w.began, w.ended) for w in found.windows] == [(1.0, 9.0), (21.0, 29.0)]


def test_validation_and_requests_that_never_ran_do_not_count() -> None:
    ran = requests((1, 0, 1, 5), (1, 0, np.nan, 5), (1, 0, 1, 9))
    ran["validate"] = np.array([False, False, True])
    found = measure(ran, steps_of(1), None, runs_on=False)
    assert found is not None
    assert (found.slots, found.logged, len(found.requests["started"])) == (1, False, 1)
    assert measure(requests((1, 0, np.nan, np.nan)), steps_of(1), 4, runs_on=False) is None
    assert measure(ran, stages((1, "step", 0, 20)), 4, runs_on=False) is None
