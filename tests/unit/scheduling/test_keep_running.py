"""Samples that run on while the policy is trained: a make-believe engine and trainer that wait for nobody."""

import contextlib
import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import SAMPLES, World

from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.scheduler import Scheduler

rules_of = st.one_of(
    st.builds(
        lambda batch, **rules: Rules(batch, batch * SAMPLES, on_interrupt="keep_running", **rules),
        st.integers(1, 4),
        group_batches=st.integers(1, 4),
        unit=st.sampled_from(["group", "trajectory"]),
        harvest_tokens=st.sampled_from([None, None, 60]),
        max_staleness=st.integers(1, 3),
    ),
    st.builds(
        lambda batch, **rules: Rules(batch, batch * SAMPLES, 1, on_interrupt="keep_running", **rules),
        st.integers(1, 4),
        unit=st.sampled_from(["group", "trajectory"]),
    ),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules_of, st.integers(0, 10**6), st.booleans())
def test_what_runs_on_is_trained_once_and_within_the_bound(rules, seed, uneven):
    world = World(rules, seed, uneven=uneven)
    assert world.run(100), "some prompts never had their turn"
    world.check_all()
    if not uneven and rules.harvest_tokens is None and world.limit is None:
        assert world.stale == 0, "more was started than could be trained in time"


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules_of, st.integers(0, 10**6), st.sampled_from([0.0, 0.02]), st.sampled_from([0.0, 0.1]))
def test_replicas_that_lag_and_attempts_that_are_lost_break_no_bound_and_lose_no_sample(rules, seed, mishaps, losses):
    world = World(rules, seed, lag=True, losses=losses, mishaps=mishaps)
    assert world.run(300), "some prompts never had their turn"
    world.check_all()


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules_of, st.integers(0, 10**6), st.integers(0, 200), st.booleans())
def test_a_crash_at_any_event_resumes_from_the_checkpoint(rules, seed, crash_at, lag):
    """What ran goes on from what was told before it; the checkpoint is what JSON keeps of it."""

    class Crash(Exception):
        pass

    class Mortal(World):
        events, saved = 0, None

        def event(self):
            self.events += 1
            if self.events == crash_at:
                raise Crash
            super().event()

        def publish(self):
            super().publish()
            if self.training:  # only once the scheduler knows of it
                return
            text = {s: list(text[: self.kept[s]] if s in self.running else text) for s, text in self.text.items()}
            kept = copy.deepcopy((text, self.length, self.trained, self.sizes, self.loads, self.weights))
            self.saved = json.dumps(self.scheduler.state_dict()), kept

    dead = Mortal(rules, seed, lag=lag)
    with contextlib.suppress(Crash):
        dead.run(8)
    world = World(rules, seed + 1, lag=lag)
    if dead.saved is not None:
        state, (world.text, world.length, world.trained, world.sizes, world.loads, world.weights) = dead.saved
        world.scheduler.load_state_dict(json.loads(state))
        world.replicas = [world.weights] * 3
        for sample in world.scheduler.begin(world.weights):
            world.end(sample)
    assert world.run(300)
    world.check_all()


def scheduler(**rules):
    built = Scheduler(Rules(1, 2, **{"on_interrupt": "keep_running", "max_staleness": 1, **rules}))
    built.begin(0)
    for number in range(built.loadable()):
        built.load(f"p{number}", 2)
    built.dispatch()
    return built


def finish(built, uid, *lengths, version=0):
    for number, length in enumerate(lengths):
        assert built.generate(uid, number, length, version)
        built.finish(uid, number)


def test_no_more_is_started_than_the_updates_within_the_bound_can_train():
    built = scheduler(group_batches=4)
    assert [prompt.uid for prompt, number, _ in built.ledger.samples("running") if number == 0] == ["p0", "p1"]
    finish(built, "p1", 3, 3)
    assert built.harvest().samples == [("p1", 0), ("p1", 1)]
    assert built.dispatch() == []  # p0 fills the one update that may train what the old policy says
    built.begin(1)
    assert built.dispatch() == [("p2", 0), ("p2", 1)]


def test_what_would_be_too_stale_at_the_next_update_is_waited_for():
    built = scheduler()
    finish(built, "p1", 3, 3)
    built.harvest()
    assert built.begin(1) == []  # p0 runs on
    built.dispatch()
    finish(built, "p2", 3, 3, version=1)
    assert not built.enough()
    finish(built, "p0", 9, 9, version=0)
    batch = built.harvest()
    assert batch.samples == [("p0", 0), ("p0", 1)]  # first, though longer
    assert batch.staleness == [1, 1]


def test_who_may_answer_what_starts_is_as_old_as_the_bound_allows():
    """Of update batches as they were loaded, with replicas that take new versions one by one."""
    rules = {"load": "rolling", "harvest": "loaded"}
    built = scheduler(**rules)
    assert built.oldest_versions(["p0", "p1"]) == [0, 0]  # p1 is trained by version 1 at the earliest
    finish(built, "p0", 3, 3)
    built.harvest()
    assert built.oldest_versions(["p1"]) == [0]
    built.load("p2", 2)
    assert built.oldest_versions(["p1", "p2"]) == [0, 1], "p2 is trained by version 2, which is not there yet"
    built.begin(1)
    assert built.oldest_versions(["p1", "p2"]) == [0, 1]
    built.load("p3", 2)
    assert built.oldest_versions(["p3"]) == [1], "no update comes before p3 starts"


@pytest.mark.parametrize(("one_by_one", "wanted"), [(True, 3), (False, 0)])
def test_any_of_the_next_updates_may_take_what_is_finished_first(one_by_one, wanted):
    built = scheduler(load="rolling", one_by_one=one_by_one, on_interrupt="continue")
    built.begin(3)
    assert built.oldest_versions(["p1"]) == [wanted]


def test_what_the_next_harvests_could_not_all_take_is_waited_for_before():
    """Two of three old prompts are left and each fits into one of the two batches that may train them."""
    built = scheduler(max_staleness=2)
    finish(built, "p1", 3, 3)
    built.harvest()
    built.begin(1)
    assert built.dispatch() == [("p3", 0), ("p3", 1)]
    finish(built, "p3", 1, 1, version=1)
    assert not built.enough(), "p0 and p2 would be left for one batch"
    finish(built, "p2", 9, 9)
    assert built.harvest().samples == [("p2", 0), ("p2", 1)]  # though p3 is shorter
    built.begin(2)
    assert not built.enough()
    finish(built, "p0", 9, 9)
    assert built.harvest().staleness == [2, 2]
    assert built.begin(3) == []


def test_where_more_is_due_than_a_batch_holds_the_rest_is_not_waited_for():
    built = scheduler()
    built.begin(1)
    finish(built, "p1", 9, 9)
    assert built.enough(), "p0 is lost, and what is made meanwhile would be, too"


def test_a_request_that_only_queued_is_as_young_as_its_first_token():
    built = scheduler()
    finish(built, "p1", 3, 3)
    built.harvest()
    built.begin(1)
    built.dispatch()
    finish(built, "p2", 3, 3, version=1)
    assert all(built.progress("p0", number, None) for number in range(2))
    assert built.harvest().samples == [("p2", 0), ("p2", 1)]
    assert built.begin(2) == []


def test_what_is_past_the_bound_is_generated_anew_while_it_runs_or_when_it_tells():
    built = scheduler(group_batches=1)
    assert built.begin(2) == [("p0", 0), ("p0", 1)]  # two updates by somebody else
    assert built.step.stale == 2
    assert built.dispatch() == [("p0", 0), ("p0", 1)]
    assert not built.progress("p0", 0, 0)  # its replica has not taken the weights
    assert not built.generate("p0", 1, 7, 0)
    assert built.step.wasted_tokens == 7
    assert built.dispatch() == [("p0", 1), ("p0", 0)]
    assert not built.interrupt("p0", 0, 5, 0)
    assert built.interrupt("p0", 1, 5, 1)
    assert [sample.first_version for sample in built.ledger.prompt("p0").samples] == [None, 1]


def test_what_goes_on_stays_as_old_as_what_it_goes_on_from():
    built = scheduler(group_batches=1)
    assert built.interrupt("p0", 0, 5, 0)
    built.begin(1)
    built.dispatch()
    assert built.progress("p0", 0, None)
    assert built.begin(2) == [("p0", 0), ("p0", 1)]


def test_a_batch_waits_for_the_rewards_of_the_shortest_but_for_nothing_that_runs():
    built = scheduler()
    finish(built, "p1", 9, 9)
    assert built.settled(0.0)  # p0 runs on
    assert all(built.generate("p0", number, 5, 0) for number in range(2))
    assert not built.settled(0.0)
    assert built.settled(30.0)
    assert built.give_up() == []
    assert built.harvest().samples == [("p1", 0), ("p1", 1)]


def test_within_one_version_nothing_starts_until_the_policy_is_new():
    built = scheduler(group_batches=1, max_staleness=0)
    finish(built, "p0", 3, 3)
    built.harvest()
    built.load("p1", 2)
    assert built.dispatch() == []
    built.begin(1)
    assert built.dispatch() == [("p1", 0), ("p1", 1)]


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"on_interrupt": "continue"}, ["on_interrupt=continue", "max_staleness", "at least 1", "regenerate"]),
        ({"on_interrupt": "keep_running"}, ["keep_running", "max_staleness=0", "group_batches=1"]),
        ({"on_interrupt": "keep_running", "group_batches": 1, "harvest_tokens": 9}, ["harvest_tokens=null"]),
        ({"max_staleness": -1}, ["max_staleness", "at least 0", "-1"]),
        ({"on_interrupt": "stop"}, ["on_interrupt", "keep_running", "'stop'"]),
        ({"unit": "prompt"}, ["unit", "trajectory", "'prompt'"]),
        ({"group_batches": 0}, ["a load at least one batch"]),
    ],
)
def test_rules_that_contradict_each_other_say_how_to_mend_them(rules, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the words are looked at below)
        Rules(1, 2, **rules)
    assert not [word for word in words if word not in str(caught.value)]


def test_a_probe_tells_its_length_before_its_siblings_start():
    built = Scheduler(Rules(2, 6, group_batches=1, probe=True))
    built.begin(0)
    for uid in ("p0", "p1"):
        built.load(uid, 3)
    assert built.dispatch() == [("p0", 0), ("p1", 0)]
    assert built.dispatch() == []
    built.interrupt("p0", 0, 5, 0)
    assert built.dispatch() == [("p0", 0)], "a probe that was cut short is still the probe"
    assert built.generate("p1", 0, 9, 0)
    assert built.dispatch() == [("p1", 1), ("p1", 2)]
    built.abandon("p0", 0)
    assert built.dispatch() == [("p0", 0)]
    assert built.generate("p0", 0, 9, 0)
    assert built.dispatch() == [("p0", 1), ("p0", 2)]
