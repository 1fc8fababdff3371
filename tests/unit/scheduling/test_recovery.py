"""Recovery by a restarted coordinator: examples; ``test_rollout_world.py`` loses the rollout at any moment."""

import pytest

from tests.unit.scheduling.reports import (
    A0,
    A1,
    A2,
    A3,
    B0,
    B1,
    ON_POLICY,
    PARTIAL,
    finished,
    generated,
    interrupted,
    restored,
    rollout,
    send,
    states,
    stored,
)
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.recovery import Recovery
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import Sample


@pytest.mark.parametrize("mode", [ON_POLICY, PARTIAL])
def test_events_since_the_saved_state_are_restored(mode):
    made = rollout(mode, prompts=[("a", 4)])
    again, gone = restored(made, {A0: stored(A0), A1: generated(A1, 4), A2: interrupted(A2, 3), A3: None})
    assert gone == []
    assert states(again) == ["finished", "generated", "pending", "running"]
    assert [start.predecessor for start in again.fill()] == [A2]
    assert again.content.needs_trajectories(A0)
    send(again, finished(A1), generated(A3), finished(A3))
    assert states(again)[1] == states(again)[3] == "finished"


def test_a_later_attempt_than_the_saved_one_counts_and_continues_from_the_turns_before_it():
    made = rollout(PARTIAL)
    send(made, interrupted(A0, 3))
    state = made.state_dict()
    third = Attempt("a", 0, 2)
    again, _ = restored(made, {A0: interrupted(A0, 3), third: None, A1: interrupted(A1, 2)}, state=state)
    assert states(again) == ["running", "pending"]
    assert again.scheduler.ledger.prompt("a").samples[0].tokens == 3
    send(again, interrupted(third, 7))
    assert again.content.pop_obsolete() == [A0]
    assert {start.predecessor for start in again.fill()} == {third, A1}


def test_samples_whose_turns_are_lost_with_their_worker_start_over():
    """Else they would count as stale, and the next step would wait for them."""
    made = rollout(PARTIAL)
    send(made, interrupted(A0, 3))
    again, _ = restored(made, {A1: None}, version=1)
    assert again.scheduler.ledger.prompt("a").samples[0] == Sample(attempt=0)
    assert again.scheduler.step.wasted_tokens == 3
    [start] = again.fill()
    assert (start.attempt.sample, start.predecessor, start.partial) == (("a", 0), None, False)


def test_prompts_without_data_are_replaced():
    made = rollout(prompts=[("a", 2), ("b", 2)])
    made.add_prompts([("c", 2), ("d", 2)])
    again, gone = restored(made, {}, prompts=("a", "d"))
    assert gone == ["b", "c"]
    assert again.state_dict()["stock"] == [("d", 2)]


def test_prompts_handed_and_started_since_the_saved_state_are_restored():
    """The coordinator died before its first batch: the rollout of a whole training step."""
    made = rollout(prompts=[], start=False)
    handed = [("a", 2), ("b", 2), ("c", 2)]
    again, gone = restored(made, {B0: interrupted(B0), B1: None}, prompts="abc", added=handed)
    assert gone == []
    assert (states(again, "a"), states(again, "b")) == (["pending"] * 2, ["pending", "running"])
    assert again.state_dict()["stock"] == [("c", 2)]
    again, gone = restored(made, {}, prompts="c", added=handed)
    assert gone == ["a", "b"]
    assert again.state_dict()["stock"] == [("c", 2)]


def test_prompts_loaded_since_the_saved_state_are_loaded_again_up_to_the_last_with_an_attempt():
    """Four may be in flight, two are. One place is for the prompt with an attempt, one for a prompt before it."""
    made = rollout(PARTIAL, prompts=(("a", 2), ("b", 2)))
    waiting = dict.fromkeys("cedf", 2)
    recovery = Recovery(made.scheduler, {Attempt("d", 0): None})
    assert recovery.load(waiting, set("abcdef"), 4) == []
    assert [prompt.uid for prompt in made.scheduler.ledger] == ["a", "b", "c", "d"]
    assert list(waiting) == ["e", "f"]


@pytest.mark.parametrize("mode", [ON_POLICY, PARTIAL])
def test_text_too_stale_for_the_current_policy_is_not_trained(mode):
    again, _ = restored(rollout(mode), {A0: stored(A0), A1: generated(A1)}, version=2)
    assert states(again) == ["pending", "pending"]
    assert A1 in again.pop_abandoned()
    assert [start.predecessor for start in again.fill()] == ([None, None] if mode is PARTIAL else [A0, A1])


def test_scores_are_restored_so_that_groups_are_filtered_by_all_of_them():
    made = rollout(prompts=[("a", 2), ("b", 2)], filters="acc")
    send(made, generated(A0), finished(A0, 0.0))
    known = {A0: stored(A0, 0.0), A1: stored(A1, 0.0), B0: stored(B0, 1.0), B1: generated(B1)}
    again, _ = restored(made, known, prompts="ab", filters="acc")
    assert [prompt.uid for prompt in again.scheduler.ledger] == ["b"]
    send(again, finished(B1, 0.0))
    assert states(again, "b") == ["finished", "finished"]


def test_reports_of_trained_samples_are_ignored_after_a_loss():
    """Single trajectories: its prompt stays in the ledger for the others."""
    made = Rollout(Rules(1, 1, unit="trajectory", **ON_POLICY))
    made.publish(0, 9)
    made.add_prompts([("a", 2)])
    made.fill()
    send(made, generated(A0), finished(A0))
    made.take()
    again, _ = restored(made, {A0: stored(A0)}, left=8)
    assert states(again) == ["trained", "pending"]
    assert not again.content.needs_turns(A0)


def test_as_many_prompts_are_in_flight_after_a_loss_though_some_were_replaced():
    """Filtered groups are filtered again by their scores; their replacements are loaded already."""
    made = Rollout(Rules(4, 8, **{**ON_POLICY, "in_flight": 2}), filters="acc")
    made.publish(0, 10)
    handed, known, state = [], {}, made.state_dict()

    def fill():
        new = [(f"p{len(handed) + i}", 2) for i in range(made.missing_prompts())]
        handed.extend(new)
        made.add_prompts(new)
        starts = [start.attempt for start in made.fill()]
        known.update(dict.fromkeys(starts))
        return starts

    for attempt in fill():
        if attempt.uid in ("p0", "p1", "p2"):
            send(made, generated(attempt), finished(attempt, 1.0))
            known[attempt] = stored(attempt, 1.0)
    assert len(fill()) == 6
    assert (len(made.scheduler.ledger), made.missing_prompts()) == (8, 0)
    prompts = {uid for uid, _ in handed}
    again, gone = restored(made, known, state=state, prompts=prompts, added=handed, left=10, filters="acc")
    assert gone == []
    assert (len(again.scheduler.ledger), again.missing_prompts()) == (8, 0)


def test_a_kept_text_continues_only_while_it_may_be_trained():
    """Its worker died, then the coordinator: the ledger must know the staleness."""
    made = rollout(PARTIAL)
    for published, predecessor in ((1, A0), (2, None)):
        again, _ = restored(made, {A0: interrupted(A0)}, version=1, left=8)
        assert again.scheduler.ledger.prompt("a").samples[0].first_version == 0
        again.publish(published, 7)
        assert predecessor in {start.predecessor for start in again.fill()}


def test_a_regenerated_sample_keeps_its_report_when_its_stale_text_is_forgotten():
    made = Rollout(Rules(1, 1, max_staleness=1, in_flight=4, refill="when_empty"))
    made.publish(0, 10)
    made.add_prompts((f"p{i}", 1) for i in range(4))
    for start in made.fill():
        send(made, generated(start.attempt), finished(start.attempt))
    made.take()
    made.publish(1, 9)
    made.take()
    state = made.state_dict()
    made.publish(2, 8)
    again = made.fill()[0].attempt
    recovered, _ = restored(
        made, {again: generated(again, version=2)}, 2, {f"p{i}" for i in range(4)}, state=state, left=8
    )
    send(recovered, finished(again))
    assert recovered.scheduler.has_batch()
