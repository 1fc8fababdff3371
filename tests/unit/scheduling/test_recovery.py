"""Recovery by a restarted coordinator: examples; ``test_rollout_world.py`` loses the rollout at any moment."""

from tests.unit.scheduling.reports import (
    A0,
    A1,
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


def test_a_finished_sample_of_a_group_that_started_over_is_not_finished_by_its_older_attempt():
    """Both returned no trajectory, and the group was regenerated: only the first was in the saved state."""
    made = Rollout(Rules(1, 2, max_staleness=1, separate=True))
    made.publish(0, 5)
    made.add_prompts([("a", 2)])
    made.fill()
    send(made, generated(A0, 0), finished(A0, empty=True))
    saved = made.state_dict()
    send(made, generated(A1, 0), finished(A1, empty=True))
    later = [start.attempt for start in made.fill(now=100.0)]
    assert [attempt.number for attempt in later] == [0, 1]
    again, _ = restored(made, {later[0]: interrupted(later[0], 3), later[1]: None}, state=saved, left=5)
    assert states(again) == ["pending", "running"]
    assert again.scheduler.ledger.prompt("a").samples[0].attempt == later[0].attempt


def test_a_running_attempt_does_not_take_the_version_of_a_finished_one():
    made = Rollout(Rules(1, 1, max_staleness=1, separate=True))
    made.publish(0, 5)
    made.add_prompts([("a", 1)])
    made.fill()
    saved = made.state_dict()
    made.publish(3, 4)
    later = Attempt("a", 0, 1)
    known = {A0: stored(A0)._replace(first_version=0), later: None}
    again, _ = restored(made, known, version=3, state=saved, left=4)
    assert states(again) == ["running"]
    assert again.scheduler.ledger.prompt("a").samples[0].first_version is None
