"""Recovery by a restarted coordinator."""

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
from verl_rhyme.scheduling.attempts import Attempt, sample_of
from verl_rhyme.scheduling.recovery import Evidence, Recovery
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules


def reopened(made, evidence, version=0, prompts=("a",), state=None, mode=ON_POLICY, handed=(), generation=0, **rules):
    again = Rollout(Rules(1, 2, **{**mode, **rules}), generation=generation)
    state = json.loads(json.dumps(made.state_dict() if state is None else state))
    gone = again.restore(state, version, 9, evidence, set(prompts), handed)
    return again, gone


@pytest.mark.parametrize("mode", [ON_POLICY, PARTIAL])
def test_events_since_the_saved_state_are_restored(mode):
    made = rollout(mode, prompts=[("a", 4)])
    again, gone = reopened(
        made,
        {
            "a_0": Evidence("generated", 5, 0, stored=True, records=[record("a_0", 5)]),
            "a_1": Evidence("generated", 4, 0, running=True),
            "a_2": Evidence("interrupted", 3, 0),
            "a_3": Evidence(running=True),
        },
        mode=mode,
    )
    assert gone == []
    assert states(again) == ["finished", "generated", "pending", "running"]
    assert [start.predecessor for start in again.fill()] == ["a_2"]
    assert again.needs_trajectories("a_0")
    send(again, finished("a_1"), generated("a_3"), finished("a_3"))
    assert states(again)[1] == states(again)[3] == "finished"


def test_a_later_attempt_than_the_saved_one_counts():
    made = rollout()
    state = made.state_dict()
    again, _ = reopened(
        made, {"a_0": Evidence("interrupted", 3, 0), Attempt("a", 0, 2).name: Evidence(running=True)}, state=state
    )
    assert states(again) == ["running", "pending"]
    send(again, generated(Attempt("a", 0, 2).name))
    assert states(again) == ["generated", "pending"]


def test_turns_of_an_attempt_before_the_saved_one_are_only_continued():
    made = rollout(PARTIAL)
    send(made, interrupted("a_0"))
    made.fill()  # attempt 1 goes on from it
    evidence = {"a_0": Evidence("interrupted", 3, 0), "a_1": Evidence("interrupted", 2, 0)}
    again, _ = reopened(made, evidence, mode=PARTIAL)
    assert states(again) == ["pending", "pending"]
    assert {start.name: start.predecessor for start in again.fill()} == {
        Attempt("a", 0, attempt=2).name: "a_0",
        Attempt("a", 1, attempt=1).name: "a_1",
    }


def test_a_response_without_its_reward_starts_again_from_its_tokens():
    made = rollout()
    again, _ = reopened(made, {"a_0": Evidence("generated", 5, 0)})
    assert states(again) == ["pending", "pending"]
    assert [start.predecessor for start in again.fill()] == ["a_0", None]


def test_no_attempt_continues_from_a_lost_report():
    made = rollout()
    send(made, generated("a_0"))
    again, _ = reopened(made, {})
    assert [start.predecessor for start in again.fill()] == [None, None]


def test_prompts_without_data_are_replaced():
    made = rollout(prompts=[("a", 2), ("b", 2)])
    made.add_prompts([("c", 2), ("d", 2)])
    again, gone = reopened(made, {}, prompts=("a", "d"))
    assert gone == ["b", "c"]
    assert again.state_dict()["stock"] == [("d", 2)]


def test_prompts_handed_and_started_since_the_saved_state_are_restored():
    """The coordinator died before its first batch: the rollout of a whole training step."""
    made = rollout(prompts=[], start=False)
    evidence = {"b_0": Evidence("interrupted", 3, 0), "b_1": Evidence(running=True)}
    handed = [("a", 2), ("b", 2), ("c", 2)]
    again, gone = reopened(made, evidence, prompts=("a", "b", "c"), handed=handed)
    assert gone == []
    assert (states(again, "a"), states(again, "b")) == (["pending"] * 2, ["pending", "running"])
    assert again.state_dict()["stock"] == [("c", 2)]
    again, gone = reopened(made, {}, prompts=("c",), handed=handed)
    assert gone == ["a", "b"]
    assert again.state_dict()["stock"] == [("c", 2)]


def test_no_name_is_used_twice_though_the_first_attempt_is_unknown():
    """An unknown attempt may still report."""
    made = rollout()
    before = {attempt.name for attempt in made.attempts()}
    again, _ = reopened(made, {}, generation=1)
    first = {start.name for start in again.fill()}
    send(again, generated("a_0"))
    assert states(again) == ["running", "running"]
    third, _ = reopened(again, {}, generation=2)
    assert len(before | first | {start.name for start in third.fill()}) == 6
    assert third.state_dict()["generation"] == 2


@pytest.mark.parametrize("mode", [ON_POLICY, PARTIAL])
def test_text_too_stale_for_the_current_policy_is_not_trained(mode):
    made = rollout(mode)
    evidence = {"a_0": Evidence("generated", 5, 0, stored=True), "a_1": Evidence("generated", 5, 0, running=True)}
    again, _ = reopened(made, evidence, version=2, mode=mode)
    assert states(again) == ["pending", "pending"]
    assert again.pop_abandoned() == ["a_1"]
    assert [start.predecessor for start in again.fill()] == ([None, None] if mode is PARTIAL else ["a_0", "a_1"])


def test_scores_are_restored_so_that_groups_are_filtered_by_all_of_them():
    made = rollout(prompts=[("a", 2), ("b", 2)], filters="acc")
    send(made, generated("a_0"), finished("a_0", 0.0))
    state = json.loads(json.dumps(made.state_dict()))

    def known(session, *scores, **more):
        return Evidence("generated", 5, 0, stored=True, records=[record(session, 5)], scores=list(scores), **more)

    evidence = {"a_0": known("a_0", 0.0), "a_1": known("a_1", 0.0), "b_0": known("b_0", 1.0)}
    evidence["b_1"] = known("b_1", running=True)  # about to report its score
    again = Rollout(made.rules, filters="acc")
    again.restore(state, 0, 9, evidence, {"a", "b"})
    assert [prompt.uid for prompt in again.scheduler.ledger] == ["b"]
    assert states(again, "b") == ["finished", "generated"]
    send(again, finished("b_1", 0.0))
    assert states(again, "b") == ["finished", "finished"]


def test_reports_of_trained_samples_are_ignored_after_a_loss():
    """Single trajectories: its prompt stays in the ledger for the others."""
    made = Rollout(Rules(1, 1, unit="trajectory", **ON_POLICY))
    made.publish(0, 9)
    made.add_prompts([("a", 2)])
    made.fill()
    send(made, generated("a_0"), finished("a_0"))
    made.take()
    again = Rollout(made.rules, generation=1)
    again.restore(made.state_dict(), 0, 8, {"a_0": Evidence("generated", 5, 0, stored=True)}, {"a"})
    assert states(again) == ["trained", "pending"]
    assert not again.needs_turns("a_0")


def test_as_many_prompts_are_in_flight_after_a_loss_though_some_were_replaced():
    """Filtered groups are filtered again by their scores; their replacements are loaded already."""
    made = Rollout(Rules(4, 8, **{**ON_POLICY, "in_flight": 2}), filters="acc")
    made.publish(0, 10)
    handed, evidence, state = [], {}, made.state_dict()

    def fill():
        new = [(f"p{len(handed) + i}", 2) for i in range(made.missing_prompts())]
        handed.extend(new)
        made.add_prompts(new)
        starts = made.fill()
        evidence.update({start.name: Evidence(running=True) for start in starts})
        return starts

    for start in fill():
        if sample_of(start.name)[0] in ("p0", "p1", "p2"):
            send(made, generated(start.name), finished(start.name, 1.0))
            evidence[start.name] = Evidence("generated", 5, 0, stored=True, scores=[1.0])
    assert len(fill()) == 6
    assert (len(made.scheduler.ledger), made.missing_prompts()) == (8, 0)
    again = Rollout(made.rules, filters="acc", generation=1)
    assert again.restore(state, 0, 10, evidence, {uid for uid, _ in handed}, handed) == []
    assert (len(again.scheduler.ledger), again.missing_prompts()) == (8, 0)


def test_a_text_with_a_lost_reward_continues_only_while_it_may_be_trained():
    """Its worker died, then the coordinator: the ledger must know the staleness."""
    made = rollout(PARTIAL)
    evidence = {"a_0": Evidence("generated", 5, 0)}
    again = Rollout(made.rules, generation=1)
    again.restore(made.state_dict(), 1, 8, evidence, {"a"})
    assert again.scheduler.ledger.prompt("a").samples[0].first_version == 0
    again.publish(2, 7)
    assert {start.predecessor for start in again.fill()} == {None}
    again = Rollout(made.rules, generation=1)
    again.restore(made.state_dict(), 1, 8, evidence, {"a"})
    assert "a_0" in {start.predecessor for start in again.fill()}


def test_prompts_loaded_since_the_saved_state_are_loaded_again_up_to_the_last_with_evidence():
    """Four may be in flight, two are. One place is for the prompt with an attempt, one for a prompt before it."""
    made = rollout(PARTIAL, prompts=(("a", 2), ("b", 2)))
    waiting = dict.fromkeys("cedf", 2)
    recovery = Recovery(made.scheduler, {}, {Attempt("d", 0, 0).name: Evidence(running=True)})
    assert recovery.load(waiting, set("abcdef"), 4) == []
    assert [prompt.uid for prompt in made.scheduler.ledger] == ["a", "b", "c", "d"]
    assert list(waiting) == ["e", "f"]
