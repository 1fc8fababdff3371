"""Engines apart from the actor, which run on while it trains and whose requests its new weights cut short."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import SAMPLES, Separate

from verl_rhyme.scheduling.rules import Rules, named
from verl_rhyme.scheduling.scheduler import Scheduler

rules_of = st.builds(
    lambda batch, mode, draft_ahead, **rules: named(
        mode,
        batch_prompts=batch,
        batch_samples=batch * SAMPLES,
        through_training=True,
        draft_ahead=draft_ahead and mode == "on_policy",
        **rules,
    ),
    batch=st.integers(1, 4),
    mode=st.sampled_from(["on_policy", "partial"]),
    draft_ahead=st.booleans(),
    group_batches=st.integers(1, 4),
    unit=st.sampled_from(["group", "trajectory"]),
    harvest_tokens=st.sampled_from([None, None, 60]),
    max_staleness=st.integers(1, 3),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules_of, st.integers(0, 10**6), st.booleans())
def test_what_runs_through_training_is_trained_once_and_within_the_bound(rules, seed, uneven):
    world = Separate(rules, seed, uneven=uneven)
    assert world.run(200), "some prompts never had their turn"
    world.check_all()
    if rules.max_staleness == 0 and not rules.draft_ahead:
        assert world.ahead == 0
    if rules.continues and not uneven and rules.harvest_tokens is None and world.limit is None:
        assert world.stale == 0, "more was started than could be trained in time"
    if not rules.continues:  # what runs at the end is nobody's
        trained = sum(len(world.text[sample]) for sample in world.trained)
        assert world.made == trained + world.wasted + world.scheduler.step.wasted_tokens


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules_of, st.integers(0, 10**6), st.sampled_from([0.0, 0.02]), st.sampled_from([0.05, 0.3]))
def test_what_is_lost_while_the_actor_trains_breaks_no_bound_and_loses_no_sample(rules, seed, mishaps, losses):
    world = Separate(rules, seed, losses=losses, mishaps=mishaps)
    assert world.run(400), "some prompts never had their turn"
    world.check_all()


def scheduler(mode="on_policy", **rules):
    sizes = {"batch_prompts": 1, "batch_samples": 2, "group_batches": 2, "max_staleness": 1, "through_training": True}
    built = Scheduler(named(mode, **{**sizes, **rules}))
    built.begin(0)
    for number in range(built.loadable()):
        built.load(f"p{number}", 2)
    built.dispatch()
    return built


def harvested(**rules):
    """p0 is harvested and p1 runs on."""
    built = scheduler(**rules)
    for number in range(2):
        built.generate("p0", number, 5, 0)
        built.finish("p0", number)
    assert built.enough()
    assert built.settled(0.0), "waits for what runs, though no engine stops"
    assert built.give_up() == []
    built.harvest()
    return built


@pytest.mark.parametrize("rules", [{"mode": "on_policy"}, {"mode": "partial"}])
def test_no_batch_is_taken_before_the_policy_is_new(rules):
    built = harvested(**rules)
    for number in range(2):
        built.generate("p1", number, 5, 0)
        built.finish("p1", number)
    assert not built.enough()
    assert not built.ready()
    restored = Scheduler(built.rules)
    restored.load_state_dict(built.state_dict())
    assert not restored.enough()
    assert built.begin(1) == ([("p1", 0), ("p1", 1)] if rules["mode"] == "on_policy" else [])
    assert built.ready() == (rules["mode"] == "partial")


def test_on_policy_nothing_starts_while_the_actor_trains_unless_it_drafts_ahead():
    for draft_ahead in (False, True):
        built = harvested(draft_ahead=draft_ahead)
        built.interrupt("p1", 0, 3, 0)
        assert built.dispatch() == [("p1", 0)] * draft_ahead
        built.begin(1)
        assert built.dispatch() == [("p1", 0)] * (not draft_ahead)


def test_what_is_drafted_ahead_is_wasted_and_generated_anew_but_a_request_that_only_queued_is_trained():
    built = harvested(draft_ahead=True)
    built.generate("p1", 0, 5, 0)
    assert built.begin(1) == [("p1", 0)]
    assert built.step.wasted_tokens == 5
    built.interrupt("p1", 1, 3, 0)  # told late of what the new weights cut short
    assert built.step.wasted_tokens == 8
    assert sorted(built.dispatch()) == [("p1", 0), ("p1", 1)]
    assert not built.generate("p1", 0, 5, 0)
    assert built.generate("p1", 1, 5, 1)


def test_in_partial_mode_samples_start_while_the_actor_trains_and_their_first_token_tells_their_age():
    built = harvested(mode="partial", group_batches=3, max_staleness=2)
    assert built.interrupt("p1", 0, 3, 0)
    assert built.dispatch() == [("p1", 0)]
    assert built.generate("p1", 1, 4, 1)  # a replica has the weights before the scheduler hears of them
    built.begin(1)
    assert [sample.oldest_version for sample in built.ledger.prompt("p1").samples] == [0, 1]
    assert [sample.oldest_version for sample in built.ledger.prompt("p2").samples] == [0, 0]
    assert built.progress("p2", 0, None)  # it only queued
    built.interrupt("p2", 1, 3, 1)
    assert [sample.oldest_version for sample in built.ledger.prompt("p2").samples] == [1, 1]


def test_in_partial_mode_no_more_is_begun_than_can_be_trained_in_time():
    built = harvested(mode="partial", group_batches=3)
    assert built.dispatch() == []  # p1 fills the one update that may train what the old policy says
    built.begin(1)
    assert built.dispatch() == [("p2", 0), ("p2", 1)]


def test_who_was_busy_elsewhere_over_a_version_change_is_as_old_as_what_it_said_before():
    built = harvested(mode="partial", group_batches=3)
    built.begin(1)  # p1 tells nothing: a tool
    assert built.dispatch() == [("p2", 0), ("p2", 1)]
    for number in range(2):
        assert built.generate("p2", number, 5, 1)
        built.finish("p2", number)
    assert not built.enough(), "p1 would be too stale at the next update"
    for number in range(2):
        assert built.generate("p1", number, 9, 0)
        built.finish("p1", number)
    assert built.harvest().staleness == [1, 1]
    built = harvested(mode="partial", group_batches=3)
    built.begin(1)
    assert built.begin(2) == [("p1", 0), ("p1", 1)]  # one more, though they were due


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"draft_ahead": True}, ["draft_ahead=true", "through_training", "draft_ahead=false"]),
        (
            {"draft_ahead": True, "through_training": True, "max_staleness": 1},
            ["draft_ahead=true", "max_staleness=1", "draft_ahead=false", "max_staleness=0"],
        ),
        (
            {"draft_ahead": True, "through_training": True, "on_interrupt": "keep_running", "group_batches": 1},
            ["draft_ahead=true", "on_interrupt=keep_running", "on_interrupt=regenerate"],
        ),
    ],
)
def test_rules_of_drafting_ahead_that_contradict_each_other_say_how_to_mend_them(rules, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the words are looked at below)
        Rules(1, 2, **rules)
    assert not [word for word in words if word not in str(caught.value)]


def test_what_is_due_is_not_passed_by_for_what_is_shorter_though_little_is_there():
    rules = named("partial", batch_prompts=1, batch_samples=2, group_batches=4, max_staleness=3, through_training=True)
    scheduler = Scheduler(rules)
    scheduler.begin(4)
    for uid in ("old", "a", "b", "new"):
        scheduler.load(uid, 2)
    scheduler.dispatch()
    for uid in ("old", "a", "b"):
        for number in range(2):
            scheduler.progress(uid, number, 4)
    scheduler.begin(5)
    for uid, tokens, version in (("old", 900, 4), ("new", 10, 5)):
        for number in range(2):
            scheduler.progress(uid, number, version)
            scheduler.generate(uid, number, tokens, version)
            scheduler.finish(uid, number)
    assert {uid for uid, _ in scheduler.harvest().samples} == {"old"}, "three groups of version 4, and three updates"
