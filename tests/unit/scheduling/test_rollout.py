"""Starts of samples, reports that count, and parts of batches; losses are those of ``test_rollout_world.py``."""

import pytest

from tests.unit.scheduling.reports import (
    A0,
    A1,
    A2,
    B0,
    B1,
    ON_POLICY,
    PARTIAL,
    failed,
    finished,
    generated,
    interrupted,
    restored,
    rollout,
    send,
    states,
    stored,
    through,
)
from verl_rhyme.scheduling.attempts import Attempt, sample_of
from verl_rhyme.scheduling.group_filter import RolloutError
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules


@pytest.mark.parametrize("attempt", [Attempt("a", 0, 0), Attempt("a_b-c", 7, 3), Attempt("x", 65535, 1)])
def test_attempt_names_are_parsed_back(attempt):
    assert Attempt.named(attempt.name) == attempt
    assert sample_of(attempt.name) == attempt.sample


def test_a_sample_runs_from_start_to_batch():
    made = rollout()
    send(made, generated(A0))
    assert states(made) == ["generated", "running"]
    assert made.content.needs_turns(A0)
    send(made, finished(A0), generated(A1, 2), finished(A1))
    assert (made.content.needs_turns(A0), made.content.needs_trajectories(A0)) == (False, True)
    batch = made.take()
    assert batch.attempts == [A1, A0]
    assert [r["response_tokens"] for r in batch.trained] == [2, 5]
    assert (len(batch.ran), batch.wasted) == (2, [])
    assert not made.content.needs_prompt("a")


def test_reports_of_earlier_attempts_change_nothing():
    made = rollout()
    made.lost([A0])
    [start] = made.fill()
    assert start.attempt == Attempt("a", 0, 1)
    send(made, generated(A0), finished(A0), failed(A0))
    assert states(made) == ["running", "running"]
    assert made.scheduler.step.abandoned == 1
    assert not made.content.needs_trajectories(A0), "it would be trained"
    assert made.content.pop_obsolete() == [A0], "its worker keeps the turns of the failed one"
    assert made.lost([A0]) == []


@pytest.mark.parametrize(("drafts", "predecessor"), [(True, A0), (False, None)])
@pytest.mark.parametrize("end", [(generated, failed), (interrupted,), (failed,)])
def test_on_policy_text_of_the_current_version_is_continued_and_else_a_draft(end, drafts, predecessor):
    """A reward failed, a tool failed, or the engines continue because a reward failed: no token is generated again."""
    made = rollout(drafts=drafts)
    send(made, *(each(A0) for each in end))
    [start] = made.fill(now=60.0)
    assert (start.predecessor, start.partial, start.spans) == (A0, True, False)
    assert (made.content.kept_tokens("a", 0), made.scheduler.step.wasted_tokens) == (5, 0)
    made.lost([start.attempt])
    made.publish(1, None)
    [start] = made.fill(now=60.0)
    assert (start.predecessor, start.partial) == (predecessor, False)
    assert (made.content.kept_tokens("a", 0), made.scheduler.step.wasted_tokens) == (0, 5)


def test_samples_that_are_always_regenerated_do_not_continue_on_policy():
    """As the replay of expert routes requires."""
    made = rollout(at_version="regenerate")
    send(made, generated(A0), failed(A0))
    [start] = made.fill(now=60.0)
    assert (start.predecessor, start.partial) == (A0, False)
    assert made.scheduler.step.wasted_tokens == 5


def test_a_too_stale_sample_is_wasted_and_its_attempt_ends():
    made = rollout()
    send(made, generated(A0), generated(A1, 2), finished(A1))
    made.publish(1, None)
    assert states(made) == ["pending", "pending"]
    assert made.pop_abandoned() == [A0]  # it waits for its reward
    assert [(s.predecessor, s.stored) for s in made.fill()] == [(A0, False), (A1, True)]
    assert made.scheduler.step.wasted_tokens == 7
    assert (made.scheduler.step.stale, sum(r["response_tokens"] for r in made.content.wasted)) == (2, 7)


def test_a_server_without_the_latest_weights_stops_the_run():
    made = rollout(start=False)
    made.publish(1, None)
    made.fill()
    with pytest.raises(RuntimeError, match=r"staleness 1, and 0 to 0 is allowed.* without the latest weights"):
        send(made, generated(A0, version=0))


@pytest.mark.parametrize("end", [generated, interrupted])
def test_no_attempt_continues_from_text_that_was_too_stale_when_reported(end):
    """It would be reported and too stale again, without end."""
    made = rollout(PARTIAL, separate=True)
    send(made, end(A0))
    made.publish(1, None)
    again = [start.attempt for start in made.fill()]
    made.publish(2, None)
    send(made, *(end(attempt, version=0) for attempt in again), end(A1, version=0))
    assert [start.predecessor for start in made.fill()] == [None] * 2
    assert sum(row["response_tokens"] for row in made.content.wasted) > 0


# ---- groups ----


def test_a_group_with_one_score_is_replaced_and_counted():
    made = rollout(prompts=[("a", 2), ("b", 2)], filters="acc", in_flight=2)
    for attempt, score in ((A0, 0.0), (A1, 0.0), (B0, 0.0), (B1, 1.0)):
        send(made, generated(attempt), finished(attempt, score))
    assert [prompt.uid for prompt in made.scheduler.ledger] == ["b"]
    assert made.missing_prompts() == 1
    batch = made.take()
    assert (batch.filtered, len(batch.wasted), made.scheduler.step.wasted_tokens) == ({0.0: 1}, 2, 0)


@pytest.mark.parametrize(("score", "filtered"), [(0.0, {}), (1.0, {1.0: 1})])
def test_a_sample_without_a_trajectory_is_absent_from_its_group_as_in_verl(score, filtered):
    """The others are trained; their scores decide about the group; its tokens are wasted."""
    made = rollout(filters=True, prompts=[("a", 3), ("b", 3)])
    send(
        made,
        generated(A0),
        generated(A1, 0, None, [{"id": "x", "response_tokens": 7, "started_at": 0.0, "finished_at": 1.0}]),
        generated(A2),
    )
    send(made, finished(A0, 1.0), finished(A1, empty=True), finished(A2, score))
    assert made.filtered == filtered
    if not filtered:
        batch = made.take()
        assert (batch.attempts, len(batch.collected.samples), batch.failed) == ([A0, A2], 3, 0)
        assert [record["id"] for record in batch.wasted] == ["x"]


def test_samples_without_a_trajectory_are_known_after_a_restart():
    """It finished before the state was saved, and no entry of the queue shows it."""
    made = rollout()
    send(made, generated(A0, 0), finished(A0, empty=True), generated(A1))
    again, _ = restored(made, {A1: stored(A1)})
    assert again.take().attempts == [A1]
    again, _ = restored(made, {}, version=2)  # it is too old to be trained
    assert states(again) == ["pending", "pending"]
    assert again.state_dict()["empty"] == []


def test_an_update_without_any_trajectory_ends_the_run():
    """Where samples are trained one by one, the others of their groups may still run."""
    made = Rollout(Rules(2, 4, unit="trajectory", **ON_POLICY))
    made.publish(0, None)
    made.add_prompts([(f"p{number}", 2) for number in range(8)])
    for start in made.fill():
        if start.attempt.number == 0:
            send(made, generated(start.attempt, 0), finished(start.attempt, empty=True))
    with pytest.raises(RolloutError, match="no trajectory for any of the 4 samples of a batch"):
        made.take()


# ---- prompts ----


def test_prompts_are_taken_from_the_stock_once_and_as_many_as_are_loadable():
    made = rollout(prompts=[(f"p{n}", 2) for n in range(6)], start=False)
    assert made.missing_prompts() == 0
    made.add_prompts([("p0", 2), ("p9", 2)])
    assert len({start.attempt.uid for start in made.fill()}) == 4  # a group of batches
    assert made.content.needs_prompt("p9")
    made.add_prompts([("p0", 2)])
    assert made.state_dict()["stock"] == [("p4", 2), ("p5", 2), ("p9", 2)]


def test_samples_that_the_next_batch_waits_for_start_in_any_case():
    """After a loss a replaced prompt and its replacement are both present: more than may start."""
    rollout = Rollout(Rules(1, 2, max_staleness=1, take="loaded", separate=True))
    rollout.publish(0, 3)
    for uid in "abc":  # one more than rolls on
        rollout.scheduler.load(uid, 2)
    for uid in "bc":
        for number in range(2):
            rollout.scheduler.ledger.move(uid, number, "running")
    assert [start.attempt for start in rollout.fill()] == [A0, A1]
    assert rollout.fill() == []


# ---- parts ----


def attempts(uids, samples=2):
    return [Attempt(uid, number) for uid in uids for number in range(samples)]


def loaded(uids, *rules, **more):
    made = Rollout(Rules(*rules, separate=True, **more))
    made.publish(0, None)
    made.add_prompts([(uid, 2) for uid in uids])
    made.fill()
    return made


def test_parts_are_whole_groups_of_the_next_batch_also_after_a_loss():
    made = loaded("abcd", 4, 8, max_staleness=0, take="loaded")
    a0, _, b0, _, *c, d0, d1 = attempts("abcd")
    through(made, a0, b0, *c)
    assert made.part(3) == []
    assert made.part(2) == c
    assert made.part(1) == [], "each part once"
    again, _ = restored(made, {attempt: stored(attempt) for attempt in (a0, b0, *c)}, prompts="abcd")
    assert again.part(1) == c
    through(made, B1, A1)
    assert made.part(4) == attempts("ba"), "in the order in which they were done"
    through(made, d0, d1)
    assert {*made.take().attempts} == {*attempts("abcd")}
    assert made.part(1) == []


def test_a_part_omits_samples_without_a_trajectory():
    made = loaded("a", 1, 2, max_staleness=0, take="loaded")
    send(made, generated(A0), finished(A0), generated(A1, 0), finished(A1, empty=True))
    assert made.part(1) == [A0]
