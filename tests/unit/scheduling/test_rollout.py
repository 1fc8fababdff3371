"""Starts of samples, reports that count, and recovery by a restarted coordinator."""

import json

import pytest

from verl_rhyme.scheduling.attempts import Attempt, Ended, sample_of
from verl_rhyme.scheduling.group_filter import RolloutError
from verl_rhyme.scheduling.recovery import Evidence, Recovery
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules

#: SortedRL's four batches in flight, on-policy and partial.
ON_POLICY = {"max_staleness": 0, "in_flight": 4, "refill": "when_empty"}
PARTIAL = {**ON_POLICY, "max_staleness": 1}


def rollout(mode=ON_POLICY, prompts=(("a", 2),), filters=None, start=True, **rules):
    made = Rollout(Rules(1, 2, **{**mode, **rules}), filters)
    made.publish(0, None)
    made.add_prompts(prompts)
    if start:
        made.fill()
    return made


def record(session, tokens, version=0):
    return {"id": f"{session}/{tokens}", "response_tokens": tokens, "policy_version_end": version}


def generated(session, tokens=5, version=0):
    return Ended(session, "generated", tokens, version, [record(session, tokens, version)])


def interrupted(session, tokens=3, version=0):
    return Ended(session, "interrupted", tokens, version, [record(session, tokens, version)])


def finished(session, *scores):
    return Ended(session, "finished", scores=list(scores))


def tell(made, *ended):
    for told in ended:
        made.ended(told)


def states(made, uid="a"):
    return [sample.state for sample in made.scheduler.ledger.prompt(uid).samples]


@pytest.mark.parametrize("attempt", [Attempt("a", 0, 0), Attempt("a_b-c", 7, 3), Attempt("x", 65535, 1)])
def test_attempt_names_are_parsed_back(attempt):
    assert Attempt.named(attempt.name) == attempt
    assert sample_of(attempt.name) == attempt.sample


def test_a_sample_runs_from_start_to_batch():
    made = rollout()
    tell(made, generated("a_0"))
    assert states(made) == ["generated", "running"]
    tell(made, finished("a_0"), generated("a_1", 2), finished("a_1"))
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
    tell(made, generated("a_0"), finished("a_0"), Ended("a_0", "failed", error="late"))
    assert states(made) == ["running", "running"]
    assert made.scheduler.step.abandoned == 1
    assert not made.needs_trajectories("a_0"), "it would be trained"
    assert made.needs_trajectories(start.name)
    assert made.lost(["a_0"]) == []


@pytest.mark.parametrize(("drafts", "predecessor"), [(True, "a_0"), (False, None)])
def test_a_regenerated_sample_drafts_from_its_text_where_drafts_are_on(drafts, predecessor):
    made = rollout(drafts=drafts)
    tell(made, interrupted("a_0"))
    assert states(made) == ["pending", "running"]
    assert made.scheduler.step.wasted_tokens == 3
    [start] = made.fill()
    assert (start.predecessor, start.partial) == (predecessor, False)
    assert made.needs_turns("a_0")


def test_a_continued_sample_is_not_wasted_and_its_records_are_reported_once():
    made = rollout(PARTIAL)
    tell(made, interrupted("a_0"))
    [start] = made.fill()
    assert (start.predecessor, start.partial) == ("a_0", True)
    again = start.name
    both = [record("a_0", 3), record(again, 4)]
    tell(made, Ended(again, "generated", 7, 0, both), finished(again), generated("a_1"), finished("a_1"))
    batch = made.take()
    assert sorted(r["response_tokens"] for r in batch.ran) == [3, 4, 5]
    assert sorted(r["response_tokens"] for r in batch.trained) == [3, 4, 5]
    assert batch.wasted == []


def test_a_response_whose_worker_died_at_its_reward_starts_from_its_tokens():
    made = rollout()
    tell(made, generated("a_0"))
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
    tell(made, generated("a_0"), generated("a_1", 2), finished("a_1"))
    made.publish(1, None)
    assert states(made) == ["pending", "pending"]
    assert made.pop_abandoned() == ["a_0"]  # it waits for its reward
    assert made.scheduler.step.wasted_tokens == 7
    assert {start.predecessor for start in made.fill()} == {"a_0", "a_1"}
    for start in [Attempt("a", n, 1).name for n in (0, 1)]:
        tell(made, generated(start, version=1), finished(start))
    batch = made.take()
    assert sorted(r["response_tokens"] for r in batch.wasted) == [2, 5]
    assert batch.counts.stale == 2


def test_a_server_without_the_latest_weights_stops_the_run():
    made = rollout(start=False)
    made.publish(1, None)
    made.fill()
    with pytest.raises(RuntimeError, match=r"staleness 1, and 0 to 0 is allowed.* without the latest weights"):
        tell(made, generated("a_0", version=0))


def test_the_error_names_the_last_failure_where_every_prompt_fails():
    made = rollout(prompts=[(f"p{n}", 2) for n in range(64)], in_flight=64)
    failures = [Ended(f"p{n}_1", "failed", error="ValueError: no such column") for n in range(64)]
    with pytest.raises(
        RolloutError, match=r"16 prompts.* sample 1 of prompt p15: ValueError: no such column"
    ) as raised:
        tell(made, *failures)
    assert "reward.custom_reward_function" in str(raised.value)


def test_a_failed_prompt_is_replaced_and_its_other_attempts_end():
    made = rollout()
    tell(made, generated("a_1"), Ended("a_0", "failed", error="no"))
    assert "a" not in made.scheduler.ledger
    assert made.pop_abandoned() == ["a_0", "a_1"]
    assert made.missing_prompts() == 4  # nothing is left: a whole group
    assert not made.needs_prompt("a")


def test_a_group_with_one_score_is_replaced_and_counted():
    made = rollout(prompts=[("a", 2), ("b", 2)], filters="acc", in_flight=2)
    for session, score in (("a_0", 0.0), ("a_1", 0.0), ("b_0", 0.0), ("b_1", 1.0)):
        tell(made, generated(session), finished(session, score))
    assert [prompt.uid for prompt in made.scheduler.ledger] == ["b"]
    assert made.missing_prompts() == 1
    batch = made.take()
    assert batch.filtered == {0.0: 1}
    assert len(batch.wasted) == 2
    assert made.scheduler.step.wasted_tokens == 0


def test_a_finished_sample_has_one_entry_in_the_queue():
    """That is its trajectory, from which a regenerated response drafts; earlier reports are removed."""
    made = rollout(prompts=[("a", 2), ("b", 2)], in_flight=2)
    tell(made, generated("a_0"))
    assert made.needs_turns("a_0"), "its worker may be lost before the reward is there"
    assert made.pop_obsolete() == []
    tell(made, finished("a_0"))
    assert (made.needs_turns("a_0"), made.needs_trajectories("a_0")) == (False, True)
    assert made.pop_obsolete() == ["a_0"]
    made.publish(1, None)  # it is regenerated
    again = next(start for start in made.fill() if sample_of(start.name) == ("a", 0))
    assert (again.predecessor, again.stored) == ("a_0", True)
    assert made.needs_trajectories("a_0")
    assert not made.may_train("a_0")
    tell(made, interrupted(again.name, version=1))
    assert not made.needs_trajectories("a_0"), "another draft is there"
    assert made.needs_turns(again.name)
    made.publish(2, None)
    third = next(start for start in made.fill() if sample_of(start.name) == ("a", 0))
    assert (third.predecessor, third.stored) == (again.name, False)
    tell(made, generated(third.name, version=2))
    assert made.pop_obsolete() == ["a_0", again.name]


def test_a_sample_without_a_trajectory_is_absent_from_its_group_as_in_verl():
    """The others are trained; their scores decide about the group."""
    made = rollout(filters=True, prompts=[("a", 3), ("b", 3)])
    tell(made, generated("a_0"), Ended("a_1", "generated"), generated("a_2"))
    tell(made, finished("a_0", 1.0), Ended("a_1", "finished", empty=True), finished("a_2", 0.0))
    assert states(made) == ["finished"] * 3
    assert made.scheduler.has_batch()
    batch = made.take()
    assert batch.attempts == ["a_0", "a_2"]
    assert len(batch.collected.samples) == 3
    assert batch.failed == 0
    made = rollout(filters=True, prompts=[("a", 3)])
    tell(made, generated("a_0"), Ended("a_1", "generated"), generated("a_2"))
    tell(made, finished("a_0", 1.0), Ended("a_1", "finished", empty=True), finished("a_2", 1.0))
    assert made.filtered == {1.0: 1}


def test_samples_without_a_trajectory_are_known_after_a_restart():
    """It finished before the state was saved, and no entry of the queue shows it."""
    made = rollout()
    tell(made, Ended("a_0", "generated"), Ended("a_0", "finished", empty=True), generated("a_1"))
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
    tell(made, Ended("a_0", "generated"), Ended("a_0", "finished", empty=True))
    made.publish(2, None)  # it is too old to be trained
    names = {sample_of(start.name): start.name for start in made.fill()}
    made.lost(["a_1"])
    names |= {sample_of(start.name): start.name for start in made.fill()}
    for number in range(2):
        tell(made, generated(names["a", number], version=2), finished(names["a", number]))
    assert sorted(made.take().attempts) == sorted(names["a", number] for number in range(2))


def test_where_no_agent_loop_gives_a_trajectory_the_run_ends():
    made = Rollout(Rules(4, 8, **ON_POLICY))
    made.publish(0, None)
    with pytest.raises(RolloutError, match=r"16 prompts in a row .* the agent loop returned no trajectory"):
        leave_nothing(made, 16)


def test_an_update_without_any_trajectory_ends_the_run():
    """Where samples are trained one by one, the others of their groups may still run."""
    rules = Rules(2, 4, unit="trajectory", **ON_POLICY)
    made = Rollout(rules)
    made.publish(0, None)
    made.add_prompts([(f"p{number}", 2) for number in range(8)])
    for start in made.fill():
        if start.name.endswith("_0"):
            tell(made, Ended(start.name, "generated"), Ended(start.name, "finished", empty=True))
    with pytest.raises(RolloutError, match="no trajectory for any of the 4 samples of a batch"):
        made.take()


def leave_nothing(made, groups):
    """Groups of which no sample leaves a trajectory."""
    for _ in range(groups):
        uid = f"g{made.scheduler.ledger.loaded}"
        made.add_prompts([(uid, 2)])
        made.fill()
        for name in (f"{uid}_0", f"{uid}_1"):
            tell(made, Ended(name, "generated"), Ended(name, "finished", empty=True))


def test_a_part_omits_samples_without_a_trajectory():
    made = stream(prompts=1)
    name = next(iter(made.attempts())).uid
    tell(made, generated(f"{name}_0"), finished(f"{name}_0"), Ended(f"{name}_1", "generated"))
    tell(made, Ended(f"{name}_1", "finished", empty=True))
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
    tell(made, end("a_0"))
    made.publish(1, None)
    again = [start.name for start in made.fill()]
    made.publish(2, None)
    tell(made, *(end(session, version=0) for session in again), end("a_1", version=0))
    assert [start.predecessor for start in made.fill()] == [None] * 2
    assert sum(row["response_tokens"] for row in made._wasted) > 0


# ---- recovery ----


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
    tell(again, finished("a_1"), generated("a_3"), finished("a_3"))
    assert states(again)[1] == states(again)[3] == "finished"


def test_a_later_attempt_than_the_saved_one_counts():
    made = rollout()
    state = made.state_dict()
    again, _ = reopened(
        made, {"a_0": Evidence("interrupted", 3, 0), Attempt("a", 0, 2).name: Evidence(running=True)}, state=state
    )
    assert states(again) == ["running", "pending"]
    tell(again, generated(Attempt("a", 0, 2).name))
    assert states(again) == ["generated", "pending"]


def test_turns_of_an_attempt_before_the_saved_one_are_only_continued():
    made = rollout(PARTIAL)
    tell(made, interrupted("a_0"))
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
    tell(made, generated("a_0"))
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
    tell(again, generated("a_0"))
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
    tell(made, generated("a_0"), finished("a_0", 0.0))
    state = json.loads(json.dumps(made.state_dict()))

    def known(session, *scores, **more):
        return Evidence("generated", 5, 0, stored=True, records=[record(session, 5)], scores=list(scores), **more)

    evidence = {"a_0": known("a_0", 0.0), "a_1": known("a_1", 0.0), "b_0": known("b_0", 1.0)}
    evidence["b_1"] = known("b_1", running=True)  # about to tell its score
    again = Rollout(made.rules, filters="acc")
    again.restore(state, 0, 9, evidence, {"a", "b"})
    assert [prompt.uid for prompt in again.scheduler.ledger] == ["b"]
    assert states(again, "b") == ["finished", "generated"]
    tell(again, finished("b_1", 0.0))
    assert states(again, "b") == ["finished", "finished"]


def test_reports_of_trained_samples_are_ignored_after_a_loss():
    """Single trajectories: its prompt stays in the ledger for the others."""
    made = Rollout(Rules(1, 1, unit="trajectory", **ON_POLICY))
    made.publish(0, 9)
    made.add_prompts([("a", 2)])
    made.fill()
    tell(made, generated("a_0"), finished("a_0"))
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
            tell(made, generated(start.name), finished(start.name, 1.0))
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
        tell(made, generated(name), finished(name))


def test_parts_are_whole_groups_of_the_next_batch():
    made = stream()
    through(made, "a_0", "b_0", "c_0", "c_1")
    assert made.part(3) == []
    assert made.part(2) == ["c_0", "c_1"]
    assert made.part(1) == [], "told once"
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
        tell(made, generated(name, tokens=1), finished(name))
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
            tell(made, generated(name, version=1), finished(name))
    assert made.part(1) == [], "four samples of c and d are due"
    for name in late:
        tell(made, generated(name, version=0), finished(name))
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


def test_prompts_loaded_since_the_saved_state_are_loaded_again_up_to_the_last_with_evidence():
    """Four may be in flight, two are. One place is for the prompt with an attempt, one for a prompt before it."""
    made = rollout(PARTIAL, prompts=(("a", 2), ("b", 2)))
    waiting = dict.fromkeys("cedf", 2)
    recovery = Recovery(made.scheduler, {}, {Attempt("d", 0, 0).name: Evidence(running=True)})
    assert recovery.load(waiting, set("abcdef"), 4) == []
    assert [prompt.uid for prompt in made.scheduler.ledger] == ["a", "b", "c", "d"]
    assert list(waiting) == ["e", "f"]
