"""Starts with forecasts and replicas; ends, losses and moves."""

import numpy as np
import pytest

from verl_rhyme.lengths.predictor import Forecast
from verl_rhyme.placement import Placement, Request
from verl_rhyme.scheduling.attempts import Attempt, Ended
from verl_rhyme.scheduling.dispatch import Dispatch
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules

RULES = {"batch_prompts": 2, "batch_samples": 4}
#: HistoPipe's on separate engines.
LOADED = {**RULES, "take": "loaded", "separate": True}


def expected(samples, had):
    tokens = np.array([1000 * (int(uid) + 1) for uid, _ in samples])
    return Forecast(tokens, 3 * tokens // 2)


def made(lengths=expected, replicas=("a", "b")):
    rollout = Rollout(Rules(**LOADED))
    dispatch = Dispatch(rollout, lengths, Placement("histopipe", {"groups": 2, "tail": 1.0}))
    dispatch.serve(dict.fromkeys(replicas, 100_000))
    rollout.add_prompts((str(n), 2) for n in range(4))
    rollout.expect({str(n): 1000.0 * (n + 1) for n in range(4)})
    rollout.publish(0, 10)
    return rollout, dispatch


def requests(dispatch):
    fleet = dispatch.placement.fleet
    return dict(zip(fleet.names, fleet.requests.tolist(), strict=True))


def test_each_start_has_its_forecast_and_its_place():
    _, dispatch = made()
    starts = {Attempt.named(start.name).sample: start for start in dispatch.fill()}
    assert len(starts) == 8
    at = {sample: start.assignment for sample, start in starts.items()}
    assert {(a.expected_tokens, a.p90_tokens) for (uid, _), a in at.items() if uid == "3"} == {(4000, 6000)}
    assert {uid: a.replica for (uid, _), a in at.items()} == {"0": "a", "1": "b", "2": "b", "3": "a"}
    assert at["3", 1].reason == "length group 2 of 2 in step 1, on 1 replicas"


def test_prompt_tokens_count():
    rollout = Rollout(Rules(**LOADED))
    placement = Placement("histopipe", {"groups": 2})
    planned: list[tuple[str, int]] = []
    placement.policy.plan = lambda step, loads: planned.extend((load.key, load.prompt_tokens) for load in loads)
    dispatch = Dispatch(rollout, expected, placement, lambda uids: [100 * int(uid) for uid in uids])
    dispatch.serve({"a": 100_000})
    rollout.add_prompts([("1", 2), ("2", 2)])
    rollout.publish(0, 10)
    starts = {Attempt.named(start.name).sample: start for start in dispatch.fill()}
    assert planned == [("1", 100), ("2", 200)]
    whole = 2 * (2000 + 3000 + 100 + 200)
    assert placement.fleet.tokens.sum() == whole
    cut = starts["2", 0].name
    rollout.ended(Ended(cut, "interrupted", 600, 0))
    dispatch.ended(cut)
    assert placement.fleet.tokens.sum() == whole - 3200
    [again] = dispatch.fill()
    assert again.partial
    assert (again.assignment.expected_tokens, placement.fleet.tokens.sum()) == (3000, whole), "it adds the rest"
    dispatch = Dispatch(rollout, expected, Placement("longest_first"), lambda uids: [7] * len(uids))
    dispatch.serve({"a": 100_000})
    dispatch.count_running({again.name: "a"})
    request, _ = dispatch.placement._running["2-0"]
    assert request.prompt_tokens == 607


def test_running_attempts_count_after_another_dispatch_takes_over():
    rollout, before = made()
    starts = {Attempt.named(start.name).sample: start for start in before.fill()}
    rollout.ended(Ended(starts["0", 0].name, "generated", 5, 0))
    dispatch = Dispatch(rollout, expected, Placement("histopipe", {"groups": 2, "tail": 1.0}))
    dispatch.serve({"a": 100_000, "c": 100_000})
    running = {start.name: start.assignment.replica for start in starts.values()}
    dispatch.count_running({**running, starts["1", 0].name: "c", "99_0": "a", "3_1_7": "a"})
    # "0" has one sample left at "a", "3" both; "1" and "2" were at "b", which is gone, but for one that went to "c".
    assert requests(dispatch) == {"a": 3, "c": 1}
    assert dispatch.placement.reason("1-0") == "replica with the fewest tokens"
    for sample in (("1", 0), ("3", 0), ("3", 1)):
        dispatch.ended(starts[sample].name, 9)
    assert requests(dispatch) == {"a": 1, "c": 0}


def test_attempts_of_a_dead_replica_count_where_they_continue():
    _, dispatch = made()
    starts = dispatch.fill()
    at = {start.name: start.assignment.replica for start in starts}
    there = [name for name, replica in at.items() if replica == "b"]
    assert there
    assert not dispatch.has_unplaced
    dispatch.serve({"a": 100_000})
    assert dispatch.has_unplaced
    counted = len(starts) - len(there)
    assert requests(dispatch) == {"a": counted}
    dispatch.count_running({**at, there[0]: ""})
    assert requests(dispatch) == {"a": counted}
    for _ in range(2):
        dispatch.count_running(dict.fromkeys(at, "a"))
        assert not dispatch.has_unplaced
        assert requests(dispatch) == {"a": len(starts)}
    for start in starts:
        dispatch.ended(start.name, 9)
    assert requests(dispatch) == {"a": 0}


def test_after_a_restart_plans_cover_unfinished_samples(monkeypatch):
    rollout, before = made()
    starts = {Attempt.named(start.name).sample: start for start in before.fill()}
    for uid, number, status in [("3", 0, "generated"), ("3", 1, "lost"), ("2", 0, "generated"), ("2", 1, "generated")]:
        rollout.ended(Ended(starts[uid, number].name, status, 5, 0))
    dispatch = Dispatch(rollout, expected, Placement("histopipe"))
    dispatch.serve({"a": 100_000, "b": 100_000})
    planned = []
    monkeypatch.setattr(dispatch.placement, "plan", lambda step, loads: planned.extend(loads))
    assert [Attempt.named(start.name).sample for start in dispatch.fill(now=9.0)] == [("3", 1)]
    assert [(load.key, load.samples) for load in planned] == [("3", 1)]


def test_without_a_policy_that_plans_the_router_decides():
    rollout = Rollout(Rules(**RULES))
    dispatch = Dispatch(rollout, expected)
    rollout.add_prompts([("0", 2), ("1", 2)])
    rollout.publish(0, 1)
    starts = dispatch.fill()
    assert [start.assignment.replica for start in starts] == [""] * 4
    assert (starts[0].assignment.expected_tokens, starts[0].assignment.reason) == (1000, "")
    dispatch.ended(starts[0].name, 5)
    assert (dispatch.watched(), dispatch.moves({starts[0].name: 3})) == ({}, [])


def test_samples_start_without_forecasts_or_replicas():
    _, dispatch = made(lengths=lambda samples, had: None, replicas=())
    starts = dispatch.fill()
    assert [(start.assignment.expected_tokens, start.assignment.replica) for start in starts] == [(None, "")] * 8
    dispatch.serve({"late": None})
    assert dispatch.fill() == []


def test_ended_attempts_take_no_room():
    rollout, dispatch = made()
    starts = dispatch.fill()
    for start in starts:
        dispatch.ended(start.name, 10)
        dispatch.ended(start.name, 10)  # reported twice
    assert not dispatch.placement.fleet.requests.any()
    assert not dispatch.placement.fleet.tokens.any()
    rollout.lost([start.name for start in starts])
    again = dispatch.fill()
    assert len(again) == 8
    for start in starts:  # a late word about an earlier attempt
        dispatch.ended(start.name, 10)
    assert dispatch.placement.fleet.requests.sum() == 8
    rollout.lost([start.name for start in again])
    dispatch.fill()
    assert dispatch.placement.fleet.requests.sum() == 8, "an attempt without a report makes room for the next"


def test_prompts_that_left_are_forgotten_with_their_running_attempts():
    rollout, dispatch = made()
    starts = dispatch.fill()
    assert any(Attempt.named(start.name).uid == "0" for start in starts)
    rollout.scheduler.drop("0")
    dispatch.retain(rollout.needs_prompt)
    assert dispatch.placement.fleet.requests.sum() == 6


@pytest.mark.parametrize("known", [True, False])
def test_moves_name_the_attempt(known):
    _, dispatch = made()
    starts = [s for s in dispatch.fill() if Attempt.named(s.name).uid == "3"]
    at = starts[0].assignment.replica
    assert {start.name for start in starts} <= set(dispatch.watched()[at])
    dispatch.serve({"a": 100_000, "b": 100_000, "c": 100_000})
    dispatch.placement.acquire(Request("long-0", "long", response_tokens=50_000, replica=at))  # else nothing is gained
    moves = dispatch.moves({starts[0].name if known else "99_0": 6001})
    assert [(move.id, move.replica) for move in moves] == [(starts[0].name, "c")] * known
    assert dispatch.moved == len(moves)
    dispatch.ended(starts[0].name, 7000)
    assert requests(dispatch)["c"] == 0


def test_a_regenerated_sample_brings_no_tokens():
    rollout, dispatch = made()
    start = next(s for s in dispatch.fill() if Attempt.named(s.name).uid == "0")
    rollout.ended(Ended(start.name, "interrupted", 600, 0))
    dispatch.ended(start.name)
    rollout.publish(2, 8)  # 600 tokens of version 0 are too old
    dispatch.retain(rollout.needs_prompt)
    again = next(s for s in dispatch.fill() if Attempt.named(s.name).sample == Attempt.named(start.name).sample)
    assert again.predecessor is None
    at = dispatch.placement.fleet.tokens.sum()
    dispatch.ended(again.name, 1000)
    assert at - dispatch.placement.fleet.tokens.sum() == 1000, "all of the 1,000 that are expected"


def test_a_replica_that_left_takes_nothing():
    rollout, dispatch = made()
    starts = dispatch.fill()
    dispatch.serve({"b": 100_000})
    rollout.lost([start.name for start in starts])
    assert {start.assignment.replica for start in dispatch.fill()} == {"b"}
