"""Starts of samples, and reports that count."""

import json

import pytest

from tests.unit.scheduling.reports import (
    ON_POLICY,
    PARTIAL,
    finished,
    generated,
    interrupted,
    record,
    rollout,
    send,
    states,
)
from verl_rhyme.scheduling.attempts import Attempt, Ended, sample_of
from verl_rhyme.scheduling.group_filter import RolloutError
from verl_rhyme.scheduling.recovery import Evidence
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import Sample


@pytest.mark.parametrize("attempt", [Attempt("a", 0, 0), Attempt("a_b-c", 7, 3), Attempt("x", 65535, 1)])
def test_attempt_names_are_parsed_back(attempt):
    assert Attempt.named(attempt.name) == attempt
    assert sample_of(attempt.name) == attempt.sample


def test_a_sample_runs_from_start_to_batch():
    made = rollout()
    send(made, generated("a_0"))
    assert states(made) == ["generated", "running"]
    send(made, finished("a_0"), generated("a_1", 2), finished("a_1"))
    assert made.scheduler.ready()
    batch = made.take()
    assert batch.attempts == ["a_1", "a_0"]
    assert [(r["uid"], r["sample"], r["response_tokens"]) for r in batch.trained] == [("a", 1, 2), ("a", 0, 5)]
    assert sorted(r["response_tokens"] for r in batch.ran) == [2, 5]
    assert batch.wasted == []
    assert not made.needs_prompt("a")
    assert not made.needs_turns("a_0")


def test_reports_of_earlier_attempts_change_nothing():
    made = rollout()
    made.lost(["a_0"])
    [start] = made.fill()
    assert start.name == Attempt("a", 0, attempt=1).name != "a_0"
    send(made, generated("a_0"), finished("a_0"), Ended("a_0", "failed", error="late"))
    assert states(made) == ["running", "running"]
    assert made.scheduler.step.abandoned == 1
    assert not made.needs_trajectories("a_0"), "it would be trained"
    assert made.needs_trajectories(start.name)
    assert made.lost(["a_0"]) == []


@pytest.mark.parametrize(("drafts", "predecessor"), [(True, "a_0"), (False, None)])
def test_a_regenerated_sample_drafts_from_its_text_where_drafts_are_on(drafts, predecessor):
    made = rollout(drafts=drafts)
    send(made, interrupted("a_0"))
    assert states(made) == ["pending", "running"]
    made.publish(1, None)
    assert made.scheduler.step.wasted_tokens == 3
    [start] = made.fill()
    assert (start.predecessor, start.partial) == (predecessor, False)
    assert made.needs_turns("a_0")


def test_tokens_lost_with_their_worker_are_wasted():
    """The worker kept them; the sample starts over, and its report does not repeat their records."""
    made = rollout(PARTIAL)
    send(made, interrupted("a_0"))
    [start] = made.fill()
    send(made, generated(start.name, 4), finished(start.name), generated("a_1"), finished("a_1"))
    batch = made.take()
    assert sorted(r["response_tokens"] for r in batch.trained) == [4, 5]
    assert [r["response_tokens"] for r in batch.wasted] == [3]


def test_samples_whose_kept_turns_are_lost_are_as_if_never_started():
    """Else they would count as stale, and the next step would wait for them."""
    made = rollout(PARTIAL)
    made.lost(["a_1"])
    send(made, interrupted("a_0"))
    made.lost([], ["a_0", "x_0"])
    assert made.scheduler.ledger.prompt("a").samples == [Sample(attempt=0), Sample(attempt=0)]
    assert made.scheduler.step.wasted_tokens == 3
    assert made.pop_obsolete() == ["a_0"]
    assert not made.needs_turns("a_0")
    made.publish(1, None)
    assert not made.scheduler.has_stale(2)
    first, other = made.fill()
    assert (first.predecessor, first.partial) == (None, False)
    send(made, generated(first.name, 4, 1), finished(first.name), generated(other.name, 4, 1), finished(other.name))
    batch = made.take()
    assert (batch.counts.stale, batch.counts.wasted_tokens) == (0, 3)
    assert [r["response_tokens"] for r in batch.wasted] == [3]


@pytest.mark.parametrize("saved", [True, False])
def test_samples_whose_kept_turns_are_lost_start_over_after_a_restart(saved):
    made = rollout(PARTIAL)
    state = json.loads(json.dumps(made.state_dict()))
    send(made, interrupted("a_0"))
    if saved:
        state = json.loads(json.dumps(made.state_dict()))
    again = Rollout(made.rules, generation=1)
    again.restore(state, 1, 9, {"a_0": Evidence("interrupted", 3, 0, lost=True), "a_1": Evidence(running=True)}, {"a"})
    assert again.scheduler.ledger.prompt("a").samples[0] == Sample(attempt=0)
    assert again.scheduler.step.wasted_tokens == 3
    assert not again.needs_turns("a_0")
    [start] = again.fill()
    assert (sample_of(start.name), start.predecessor, start.partial) == (("a", 0), None, False)


def test_an_interruption_that_is_being_reported_while_the_coordinator_restarts():
    """Its entry is in the queue, its report comes later, and its turns are those that the next attempt continues."""
    made = rollout(PARTIAL)
    send(made, interrupted("a_0"))
    state = json.loads(json.dumps(made.state_dict()))
    again = Attempt("a", 0, 1).name
    restored = Rollout(made.rules, generation=1)
    evidence = {"a_0": Evidence("interrupted", 3, 0), again: Evidence("interrupted", 7, 0, running=True)}
    restored.restore(state, 0, 9, {**evidence, "a_1": Evidence(running=True)}, {"a"})
    assert (states(restored)[0], restored.scheduler.ledger.prompt("a").samples[0].tokens) == ("running", 3)
    send(restored, interrupted(again, 7))
    assert restored.pop_obsolete() == ["a_0"]
    [start] = restored.fill()
    assert (start.predecessor, start.partial) == (again, True)


def failed(session, tokens=0, version=0):
    return Ended(session, "failed", tokens, version, [record(session, tokens, version)] if tokens else [], error="x")


@pytest.mark.parametrize("end", [(generated, failed), (interrupted,), (lambda session: failed(session, 4),)])
@pytest.mark.parametrize("drafts", [True, False])
def test_on_policy_text_of_the_current_version_is_continued(end, drafts):
    """A reward failed, a tool failed, or the engines continue because a reward failed: no token is generated again."""
    made = rollout(drafts=drafts)
    send(made, *(each("a_0") for each in end))
    tokens = made.scheduler.ledger.prompt("a").samples[0].tokens
    [start] = made.fill(now=60.0)
    assert (start.predecessor, start.partial, start.spans) == ("a_0", True, False)
    assert made.kept_tokens("a", 0) == tokens > 0
    assert made.scheduler.step.wasted_tokens == 0
    made.lost([start.name])
    made.publish(1, None)
    [start] = made.fill(now=60.0)
    assert (start.predecessor, start.partial) == ("a_0" if drafts else None, False)
    assert made.kept_tokens("a", 0) == 0
    assert made.scheduler.step.wasted_tokens == tokens


def test_samples_that_are_always_regenerated_do_not_continue_on_policy():
    """As the replay of expert routes requires."""
    made = rollout(at_version="regenerate")
    send(made, generated("a_0"), failed("a_0"))
    [start] = made.fill(now=60.0)
    assert (start.predecessor, start.partial) == ("a_0", False)
    assert made.scheduler.step.wasted_tokens == 5


def test_a_continued_sample_is_not_wasted_and_its_records_are_reported_once():
    made = rollout(PARTIAL)
    send(made, interrupted("a_0"))
    [start] = made.fill()
    assert (start.predecessor, start.partial) == ("a_0", True)
    again = start.name
    both = [record("a_0", 3), record(again, 4)]
    send(made, Ended(again, "generated", 7, 0, both), finished(again), generated("a_1"), finished("a_1"))
    batch = made.take()
    assert sorted(r["response_tokens"] for r in batch.ran) == [3, 4, 5]
    assert sorted(r["response_tokens"] for r in batch.trained) == [3, 4, 5]
    assert batch.wasted == []


def test_a_response_whose_worker_died_at_its_reward_starts_from_its_tokens():
    made = rollout()
    send(made, generated("a_0"))
    assert made.lost(["a_0"]) == ["a_0"]
    [start] = made.fill()
    assert start.predecessor == "a_0"
    assert made.needs_turns("a_0")


def test_attempts_that_stopped_engines_wait_for_too_long_are_given_up():
    made = rollout()
    assert not made.scheduler.has_settled(29.9)
    assert made.scheduler.has_settled(30.0)
    assert made.abandon_running() == ["a_0", "a_1"]
    assert made.pop_abandoned() == ["a_0", "a_1"]
    assert made.pop_abandoned() == []
    assert len(made.fill()) == 2


def test_a_too_stale_sample_is_wasted_and_its_attempt_ends():
    made = rollout()
    send(made, generated("a_0"), generated("a_1", 2), finished("a_1"))
    made.publish(1, None)
    assert states(made) == ["pending", "pending"]
    assert made.pop_abandoned() == ["a_0"]  # it waits for its reward
    assert made.scheduler.step.wasted_tokens == 7
    assert {start.predecessor for start in made.fill()} == {"a_0", "a_1"}
    for start in [Attempt("a", n, 1).name for n in (0, 1)]:
        send(made, generated(start, version=1), finished(start))
    batch = made.take()
    assert sorted(r["response_tokens"] for r in batch.wasted) == [2, 5]
    assert batch.counts.stale == 2


def test_a_server_without_the_latest_weights_stops_the_run():
    made = rollout(start=False)
    made.publish(1, None)
    made.fill()
    with pytest.raises(RuntimeError, match=r"staleness 1, and 0 to 0 is allowed.* without the latest weights"):
        send(made, generated("a_0", version=0))


def test_a_group_with_one_score_is_replaced_and_counted():
    made = rollout(prompts=[("a", 2), ("b", 2)], filters="acc", in_flight=2)
    for session, score in (("a_0", 0.0), ("a_1", 0.0), ("b_0", 0.0), ("b_1", 1.0)):
        send(made, generated(session), finished(session, score))
    assert [prompt.uid for prompt in made.scheduler.ledger] == ["b"]
    assert made.missing_prompts() == 1
    batch = made.take()
    assert batch.filtered == {0.0: 1}
    assert len(batch.wasted) == 2
    assert made.scheduler.step.wasted_tokens == 0


def test_a_finished_sample_has_one_entry_in_the_queue():
    """That is its trajectory, from which a regenerated response drafts; earlier reports are removed."""
    made = rollout(prompts=[("a", 2), ("b", 2)], in_flight=2)
    send(made, generated("a_0"))
    assert made.needs_turns("a_0"), "its worker may be lost before the reward is there"
    assert made.pop_obsolete() == []
    send(made, finished("a_0"))
    assert (made.needs_turns("a_0"), made.needs_trajectories("a_0")) == (False, True)
    assert made.pop_obsolete() == ["a_0"]
    made.publish(1, None)  # it is regenerated
    again = next(start for start in made.fill() if sample_of(start.name) == ("a", 0))
    assert (again.predecessor, again.stored) == ("a_0", True)
    assert made.needs_trajectories("a_0")
    assert not made.may_train("a_0")
    send(made, interrupted(again.name, version=1))
    assert not made.needs_trajectories("a_0"), "another draft is there"
    assert made.needs_turns(again.name)
    made.publish(2, None)
    third = next(start for start in made.fill() if sample_of(start.name) == ("a", 0))
    assert (third.predecessor, third.stored) == (again.name, False)
    send(made, generated(third.name, version=2))
    assert made.pop_obsolete() == ["a_0", again.name]


def test_a_sample_without_a_trajectory_is_absent_from_its_group_as_in_verl():
    """The others are trained; their scores decide about the group."""
    made = rollout(filters=True, prompts=[("a", 3), ("b", 3)])
    send(made, generated("a_0"), Ended("a_1", "generated"), generated("a_2"))
    send(made, finished("a_0", 1.0), Ended("a_1", "finished", empty=True), finished("a_2", 0.0))
    assert states(made) == ["finished"] * 3
    assert made.scheduler.has_batch()
    batch = made.take()
    assert batch.attempts == ["a_0", "a_2"]
    assert len(batch.collected.samples) == 3
    assert batch.failed == 0
    made = rollout(filters=True, prompts=[("a", 3)])
    send(made, generated("a_0"), Ended("a_1", "generated"), generated("a_2"))
    send(made, finished("a_0", 1.0), Ended("a_1", "finished", empty=True), finished("a_2", 1.0))
    assert made.filtered == {1.0: 1}


def test_samples_without_a_trajectory_are_known_after_a_restart():
    """It finished before the state was saved, and no entry of the queue shows it."""
    made = rollout()
    send(made, Ended("a_0", "generated"), Ended("a_0", "finished", empty=True), generated("a_1"))
    state = json.loads(json.dumps(made.state_dict()))
    again = Rollout(made.rules, generation=1)
    again.restore(state, 0, 9, {"a_0": Evidence("generated"), "a_1": Evidence("generated", 5, 0, stored=True)}, {"a"})
    assert states(again) == ["finished", "finished"]
    assert again.take().attempts == ["a_1"]
    again = Rollout(made.rules, generation=1)
    again.restore(state, 2, 9, {}, {"a"})  # it is too old to be trained
    assert states(again) == ["pending", "pending"]
    assert again.state_dict()["empty"] == []


def test_a_sample_that_is_regenerated_may_leave_a_trajectory_this_time():
    made = rollout(prompts=[("a", 2), ("b", 2)], in_flight=2)
    send(made, Ended("a_0", "generated"), Ended("a_0", "finished", empty=True))
    made.publish(2, None)  # it is too old to be trained
    names = {sample_of(start.name): start.name for start in made.fill()}
    made.lost(["a_1"])
    names |= {sample_of(start.name): start.name for start in made.fill()}
    for number in range(2):
        send(made, generated(names["a", number], version=2), finished(names["a", number]))
    assert sorted(made.take().attempts) == sorted(names["a", number] for number in range(2))


def test_an_update_without_any_trajectory_ends_the_run():
    """Where samples are trained one by one, the others of their groups may still run."""
    rules = Rules(2, 4, unit="trajectory", **ON_POLICY)
    made = Rollout(rules)
    made.publish(0, None)
    made.add_prompts([(f"p{number}", 2) for number in range(8)])
    for start in made.fill():
        if start.name.endswith("_0"):
            send(made, Ended(start.name, "generated"), Ended(start.name, "finished", empty=True))
    with pytest.raises(RolloutError, match="no trajectory for any of the 4 samples of a batch"):
        made.take()


def test_a_part_omits_samples_without_a_trajectory():
    made = stream(prompts=1)
    name = next(iter(made.attempts())).uid
    send(made, generated(f"{name}_0"), finished(f"{name}_0"), Ended(f"{name}_1", "generated"))
    send(made, Ended(f"{name}_1", "finished", empty=True))
    assert made.part(1) == [f"{name}_0"]


def test_prompts_are_taken_from_the_stock_once_and_as_many_as_are_loadable():
    made = rollout(prompts=[(f"p{n}", 2) for n in range(6)], start=False)
    assert made.missing_prompts() == 0
    made.add_prompts([("p0", 2), ("p9", 2)])
    assert len({sample_of(start.name)[0] for start in made.fill()}) == 4  # a group of batches
    assert made.needs_prompt("p9")
    assert made.missing_prompts() == 0
    made.add_prompts([("p0", 2)])
    assert made.state_dict()["stock"] == [("p4", 2), ("p5", 2), ("p9", 2)]


def test_no_more_prompts_are_wanted_than_will_be_trained():
    made = rollout(prompts=[], start=False)
    made.publish(3, 2)
    assert made.missing_prompts() == 2
    made.publish(5, 0)
    assert made.missing_prompts() == 0


@pytest.mark.parametrize("end", [generated, interrupted])
def test_no_attempt_continues_from_text_that_was_too_stale_when_reported(end):
    """It would be reported and too stale again, without end."""
    made = rollout(PARTIAL, separate=True)
    send(made, end("a_0"))
    made.publish(1, None)
    again = [start.name for start in made.fill()]
    made.publish(2, None)
    send(made, *(end(session, version=0) for session in again), end("a_1", version=0))
    assert [start.predecessor for start in made.fill()] == [None] * 2
    assert sum(row["response_tokens"] for row in made._wasted) > 0


def test_samples_that_the_next_batch_waits_for_start_in_any_case():
    """After a loss a replaced prompt and its replacement are both present: more than may start."""
    rollout = Rollout(Rules(1, 2, max_staleness=1, take="loaded", separate=True))
    rollout.publish(0, 3)
    for uid in "abc":  # one more than rolls on
        rollout.scheduler.load(uid, 2)
    for uid in "bc":
        for number in range(2):
            rollout.scheduler.ledger.move(uid, number, "running")
    assert [start.name for start in rollout.fill()] == ["a_0", "a_1"]
    assert rollout.fill() == []


def stream(prompts=4, samples=2, **rules):
    made = Rollout(Rules(prompts, prompts * samples, max_staleness=0, take="loaded", separate=True, **rules))
    made.publish(0, None)
    made.add_prompts([(uid, samples) for uid in "abcdefgh"[:prompts]])
    made.fill()
    return made


def through(made, *names):
    for name in names:
        send(made, generated(name), finished(name))


def test_parts_are_whole_groups_of_the_next_batch():
    made = stream()
    through(made, "a_0", "b_0", "c_0", "c_1")
    assert made.part(3) == []
    assert made.part(2) == ["c_0", "c_1"]
    assert made.part(1) == [], "each part once"
    through(made, "b_1", "a_1")
    assert made.part(4) == ["b_0", "b_1", "a_0", "a_1"], "in the order in which they were done"
    through(made, "d_0", "d_1")
    assert {*made.take().attempts} >= {"a_0", "b_1", "c_0", "d_1"}
    assert made.part(1) == []


def test_groups_in_a_part_are_in_the_batch_though_shorter_ones_come():
    made = Rollout(Rules(2, 4, max_staleness=1, separate=True))
    made.publish(0, None)
    made.add_prompts([(uid, 2) for uid in "abcd"])
    made.fill()
    through(made, "a_0", "a_1")
    assert made.part(1) == ["a_0", "a_1"]
    for name in ("b_0", "b_1", "c_0", "c_1"):  # generated: one token less each
        send(made, generated(name, tokens=1), finished(name))
    taken = made.take().attempts
    assert {"a_0", "a_1"} < {*taken}
    assert len(taken) == 4


def test_a_part_leaves_room_for_samples_that_must_be_trained():
    """Samples too stale for the next training step are in the batch, whatever finished before them."""
    made = Rollout(Rules(2, 4, max_staleness=1, separate=True))
    made.publish(0, None)
    made.add_prompts([(uid, 2) for uid in "abcd"])
    made.fill()
    through(made, "a_0", "a_1", "b_0", "b_1")
    made.take()
    made.publish(1, None)  # c runs since version 0: it must be trained now
    made.add_prompts([(uid, 2) for uid in "efgh"])
    made.fill()
    late = {name.name for name in made.attempts() if name.uid in "cd"}
    for uid in "efg":
        for name in [a.name for a in made.attempts() if a.uid == uid]:
            send(made, generated(name, version=1), finished(name))
    assert made.part(1) == [], "four samples of c and d are due"
    for name in late:
        send(made, generated(name, version=0), finished(name))
    assert {*made.part(1)} == late
    assert {*made.take().attempts} == late


def test_no_part_of_a_later_batch():
    made = Rollout(Rules(1, 2, max_staleness=1, take="loaded", separate=True))
    made.publish(0, None)
    made.add_prompts([("a", 2), ("b", 2)])
    made.fill()
    through(made, "b_0", "b_1")
    assert made.part(1) == []
    through(made, "a_0", "a_1")
    assert made.part(1) == ["a_0", "a_1"]
    made.take()
    made.publish(1, None)
    assert made.part(1) == ["b_0", "b_1"]


def test_parts_are_repeated_after_a_loss():
    made = stream()
    through(made, "a_0", "a_1")
    assert made.part(1) == ["a_0", "a_1"]
    again = Rollout(made.rules, generation=1)
    again.restore(json.loads(json.dumps(made.state_dict())), 0, 9, {}, set("abcd"))
    assert again.part(1) == ["a_0", "a_1"]
