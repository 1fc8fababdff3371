"""Assignments with forecasts and replicas; ends, losses and moves."""

from functools import partial

import numpy as np
import pytest

from tests.unit.scheduling.reports import generated, interrupted, restored, send
from verl_rhyme.lengths.predictor import Forecast
from verl_rhyme.placement import Placement, Request
from verl_rhyme.scheduling.attempts import Attempt, AttemptReport
from verl_rhyme.scheduling.dispatch import Dispatch
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules

RULES = {"batch_prompts": 2, "batch_samples": 4}
#: HistoPipe's on separate engines.
LOADED = {**RULES, "take": "loaded", "separate": True}


def expected(samples, had):
    tokens = np.array([1000 * (int(uid) + 1) for uid, _ in samples])
    return Forecast(tokens, 3 * tokens // 2)


def histopipe(lengths=expected, **more):
    return partial(Dispatch, lengths=lengths, placement=Placement("histopipe", {"groups": 2, "tail": 1.0}), **more)


def made(dispatch=None, replicas=("a", "b"), prompts=range(4), **rules):
    rollout = Rollout(Rules(**{**LOADED, **rules}), dispatch=dispatch or histopipe())
    rollout.dispatch.serve(dict.fromkeys(replicas, 100_000))
    rollout.add_prompts((str(n), 2) for n in prompts)
    rollout.expect({str(n): 1000.0 * (n + 1) for n in prompts})
    rollout.publish(0, 10)
    return rollout, rollout.dispatch


def fill(rollout, **arguments):
    return {start.attempt: start.assignment for start in rollout.fill(**arguments)}


def requests(dispatch):
    fleet = dispatch.placement.fleet
    return dict(zip(fleet.names, fleet.requests.tolist(), strict=True))


def test_each_start_has_its_forecast_and_its_place():
    at = fill(made()[0])
    assert len(at) == 8
    assert {(a.expected_tokens, a.p90_tokens) for attempt, a in at.items() if attempt.uid == "3"} == {(4000, 6000)}
    assert {attempt.uid: a.replica for attempt, a in at.items()} == {"0": "a", "1": "b", "2": "b", "3": "a"}
    assert at[Attempt("3", 1)].reason == "length group 2 of 2 in step 1, on 1 replicas"
    assert at[Attempt("3", 1)].priority < at[Attempt("2", 0)].priority, "the longest first, within its batch"
    assert at[Attempt("0", 0)].oldest_version == 0


def test_prompt_tokens_count():
    rollout, dispatch = made(histopipe(prompts=lambda uids: [100 * int(uid) for uid in uids]), "a", (1, 2))
    planned: list[tuple[str, int]] = []
    dispatch.placement.policy.plan = lambda step, loads: planned.extend(
        (load.key, load.prompt_tokens) for load in loads
    )
    fill(rollout)
    assert planned == [("1", 100), ("2", 200)]
    whole, fleet = 2 * (2000 + 3000 + 100 + 200), dispatch.placement.fleet
    assert fleet.tokens.sum() == whole
    cut = Attempt("2", 0)
    send(rollout, interrupted(cut, 600))
    assert fleet.tokens.sum() == whole - 3200
    [start] = rollout.fill()
    assert (start.partial, start.assignment.expected_tokens, fleet.tokens.sum()) == (True, 3000, whole)
    again, _ = restored(
        rollout,
        {start.attempt: None, cut: interrupted(cut, 600)},
        prompts="12",
        dispatch=histopipe(prompts=lambda uids: [7] * len(uids)),
    )
    again.dispatch.serve({"a": 100_000})
    again.dispatch.count_running({start.attempt: "a"})
    assert again.dispatch.placement._running["2-0"][0].prompt_tokens == 607


def test_running_attempts_count_after_another_dispatch_takes_over():
    rollout, _ = made()
    at = {attempt: assignment.replica for attempt, assignment in fill(rollout).items()}
    known = {**dict.fromkeys(at), Attempt("0", 0): generated(Attempt("0", 0))}
    again, _ = restored(rollout, known, prompts="0123", dispatch=histopipe())
    dispatch = again.dispatch
    dispatch.serve({"a": 100_000, "c": 100_000})
    dispatch.count_running({**at, Attempt("1", 0): "c", Attempt("99", 0): "a", Attempt("3", 1, 7): "a"})
    # "0" has one sample left at "a", "3" both; "1" and "2" were at "b", which is gone, but for one that went to "c".
    assert requests(dispatch) == {"a": 3, "c": 1}
    assert dispatch.placement.reason("1-0") == "replica with the fewest tokens"
    send(again, *(generated(Attempt(*sample), 9) for sample in (("1", 0), ("3", 0), ("3", 1))))
    assert requests(dispatch) == {"a": 1, "c": 0}


def test_attempts_of_a_dead_replica_count_where_they_continue():
    rollout, dispatch = made()
    at = {attempt: assignment.replica for attempt, assignment in fill(rollout).items()}
    there = [attempt for attempt, replica in at.items() if replica == "b"]
    assert there
    assert not dispatch.has_unplaced
    dispatch.serve({"a": 100_000})
    assert dispatch.has_unplaced
    dispatch.count_running({**at, there[0]: ""})
    assert requests(dispatch) == {"a": len(at) - len(there)}
    for _ in range(2):
        dispatch.count_running(dict.fromkeys(at, "a"))
        assert not dispatch.has_unplaced
        assert requests(dispatch) == {"a": len(at)}
    rollout.lost(at)
    assert requests(dispatch) == {"a": 0}
    assert {assignment.replica for assignment in fill(rollout).values()} == {"a"}


def test_after_a_restart_plans_cover_unfinished_samples(monkeypatch):
    rollout, _ = made()
    fill(rollout)
    done = {Attempt(*sample): generated(Attempt(*sample)) for sample in (("3", 0), ("2", 0), ("2", 1))}
    again, _ = restored(rollout, {**dict.fromkeys(rollout.attempts()), **done}, prompts="0123", dispatch=histopipe())
    again.dispatch.serve({"a": 100_000, "b": 100_000})
    planned = []
    monkeypatch.setattr(again.dispatch.placement, "plan", lambda step, loads: planned.extend(loads))
    send(again, AttemptReport(Attempt("3", 1), "lost"))
    assert [attempt.sample for attempt in fill(again, now=9.0)] == [("3", 1)]
    assert [(load.key, load.samples) for load in planned] == [("3", 1)]


def test_without_a_policy_that_plans_the_router_decides():
    rollout, dispatch = made(partial(Dispatch, lengths=expected), prompts=range(2), take="finished", separate=False)
    at = fill(rollout)
    assert [(a.replica, a.reason) for a in at.values()] == [("", "")] * 4
    assert {a.expected_tokens for attempt, a in at.items() if attempt.uid == "0"} == {1000}
    assert (dispatch.watched(), dispatch.moves({Attempt("0", 0): 3})) == ({}, [])


def test_samples_start_without_forecasts_or_replicas():
    rollout, dispatch = made(histopipe(lambda samples, had: None), replicas=())
    assert [(a.expected_tokens, a.replica) for a in fill(rollout).values()] == [(None, "")] * 8
    dispatch.serve({"late": None})
    assert fill(rollout) == {}


def test_ended_attempts_take_no_room():
    rollout, dispatch = made()
    starts = fill(rollout)
    for attempt in starts:
        for _ in range(2):  # reported twice
            dispatch.ended(attempt, 10)
    assert not dispatch.placement.fleet.requests.any()
    assert not dispatch.placement.fleet.tokens.any()
    for again in (starts, fill(rollout)):
        rollout.lost(again)
    assert len(fill(rollout)) == 8
    send(rollout, *(generated(attempt) for attempt in starts))  # late reports of earlier attempts
    assert dispatch.placement.fleet.requests.sum() == 8
    rollout.scheduler.drop("0")
    dispatch.retain(rollout.content.needs_prompt)
    assert dispatch.placement.fleet.requests.sum() == 6


@pytest.mark.parametrize("known", [True, False])
def test_moves_name_the_attempt(known):
    rollout, dispatch = made()
    attempts, at = zip(*((a, where.replica) for a, where in fill(rollout).items() if a.uid == "3"), strict=True)
    assert {*attempts} <= {*dispatch.watched()[at[0]]}
    dispatch.serve({"a": 100_000, "b": 100_000, "c": 100_000})
    dispatch.placement.acquire(
        Request("long-0", "long", response_tokens=50_000, replica=at[0])
    )  # else nothing is gained
    moves = dispatch.moves({attempts[0] if known else Attempt("99", 0): 6001})
    assert [(move.id, move.replica) for move in moves] == [(attempts[0], "c")] * known
    assert dispatch.moved == len(moves)
    dispatch.ended(attempts[0], 7000)
    assert requests(dispatch)["c"] == 0


def test_a_regenerated_sample_brings_no_tokens():
    rollout, dispatch = made()
    cut = next(attempt for attempt in fill(rollout) if attempt.uid == "0")
    send(rollout, interrupted(cut, 600))
    rollout.publish(2, 8)  # 600 tokens of version 0 are too old
    dispatch.retain(rollout.content.needs_prompt)
    again = next(start for start in rollout.fill() if start.attempt.sample == cut.sample)
    assert again.predecessor is None
    at = dispatch.placement.fleet.tokens.sum()
    dispatch.ended(again.attempt, 1000)
    assert at - dispatch.placement.fleet.tokens.sum() == 1000, "all of the 1,000 that are expected"
