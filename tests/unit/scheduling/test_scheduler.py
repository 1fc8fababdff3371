"""The scheduler under random schedules: a make-believe engine finishes, fails and is cut short at any moment."""

import copy
import dataclasses
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_rhyme.scheduling.rules import named
from verl_rhyme.scheduling.scheduler import Scheduler

SAMPLES, LONGEST = 3, 40

rules_of = st.builds(
    lambda batch, groups, mode, unit, threshold, staleness: named(
        mode,
        batch_prompts=batch,
        batch_samples=batch * SAMPLES,
        group_batches=groups,
        unit=unit,
        harvest_tokens=threshold,
        max_staleness=staleness,
    ),
    batch=st.integers(1, 4),
    groups=st.integers(1, 4),
    mode=st.sampled_from(["on_policy", "partial"]),
    unit=st.sampled_from(["group", "trajectory"]),
    threshold=st.sampled_from([None, None, 60]),
    staleness=st.integers(1, 3),
)


class World:
    """Engine and trainer around a scheduler; ``text`` holds the version of every token a sample has.

    ``mishaps``: share of rewards that fail. ``losses``: share of events at which an attempt gets lost with all that it
    made, and of aborts that an attempt does not hear of, and of rewards that take longer than the engines wait.
    """

    def __init__(self, rules, seed, mishaps=0.0, losses=0.0):
        self.rules, self.mishaps, self.losses = rules, mishaps, losses
        self.scheduler = Scheduler(rules)
        self.random = random.Random(seed)
        self.text, self.length, self.trained, self.batches, self.dropped = {}, {}, [], [], set()
        self.running, self.unrewarded, self.loads, self.version = [], [], 0, 0
        self.attempts = set()
        self.kept = {}  # tokens of an earlier attempt that this one began with
        self.limit = self.random.choice([None, 1, 2, 7])
        self.lot = self.random.randint(1, self.limit or 1)

    def step(self, batches_left=None):
        scheduler = self.scheduler
        for sample in scheduler.begin(self.version):
            self.text[sample] = []
        self.unrewarded = [sample for sample in self.unrewarded if self.state(sample) == "generated"]
        self.fill(batches_left)
        rewarded = False
        while True:
            while not scheduler.enough(rewarded):
                assert self.running or self.unrewarded, "nothing is on its way, nothing enough: the scheduler is stuck"
                self.advance()
                self.fill(batches_left)
            for sample in list(self.running):  # the abort: some finish before it reaches them
                if sample[0] in scheduler.ledger and self.random.random() >= self.losses:  # or are busy elsewhere
                    self.advance(sample, stop=self.random.random() < 0.8)
            while self.unrewarded and self.random.random() >= self.losses:
                self.reward()
            self.check_settled()
            assert set(scheduler.give_up()) == {sample for sample in self.running if self.state(sample) is not None}
            for sample in self.running:
                assert self.state(sample) in ("pending", None)
                self.text[sample] = self.text[sample][: self.kept[sample]]
            self.running = []
            if scheduler.ready():
                break
            rewarded = True
            self.fill(batches_left)  # a reward failed, or is long in coming: on with it
        batch = scheduler.harvest()
        self.check(batch)
        self.version += 1
        return batch

    def check_settled(self):
        """Engines stand still for rewards as long as these may change the batch, and no longer."""
        scheduler = self.scheduler
        assert scheduler.settled(self.rules.stop_wait)
        settled = scheduler.settled(0.0)
        if any(self.state(sample) is not None for sample in self.running):
            assert not settled
            return
        late = [sample for sample in self.unrewarded if self.state(sample) is not None]
        if not late:
            assert settled
            return
        rewarded = copy.deepcopy(scheduler)
        for sample in late:
            rewarded.finish(*sample)
        batch = rewarded.harvest().samples if rewarded.ready() else []
        if settled:
            assert batch == (copy.deepcopy(scheduler).harvest().samples if scheduler.ready() else [])
        elif scheduler.ready():
            assert set(late) & set(batch), "waits for the reward of a sample that is not of the batch"
        else:
            assert batch, "waits for rewards that do not fill the batch"

    def fill(self, batches_left):
        while count := self.scheduler.loadable(batches_left):
            consumed = not len(self.scheduler.ledger) or self.rules.load == "refill"
            assert consumed or count <= len(self.dropped), "loaded before all were consumed"
            for _ in range(count):
                self.scheduler.load(f"p{self.loads}", SAMPLES)
                self.loads += 1
        started = self.scheduler.dispatch(self.limit, self.lot)
        left = any(True for _ in self.scheduler.ledger.samples("pending"))
        assert not started or len(started) >= self.lot or not left, "a message for less than a lot"
        for sample in started:
            if not self.rules.continues or not self.text.get(sample):
                self.text[sample] = []
                self.length[sample] = self.random.randint(1, LONGEST)
            self.kept[sample] = len(self.text[sample])
            assert sample not in self.running
            attempt = (*sample, self.scheduler.ledger.prompt(sample[0]).samples[sample[1]].attempt)
            assert attempt not in self.attempts, "two attempts with one name"
            self.attempts.add(attempt)
            self.running.append(sample)
        alive = [sample for sample in self.running if sample[0] in self.scheduler.ledger]
        assert self.limit is None or len(alive) <= self.limit

    def reward(self):
        uid, number = sample = self.random.choice(self.unrewarded)
        self.unrewarded.remove(sample)
        if self.random.random() < self.mishaps:
            self.dropped.add(uid)
            self.scheduler.fail(uid)
        else:
            self.scheduler.finish(uid, number)

    def advance(self, sample=None, stop=None):
        if sample is None and self.unrewarded and (not self.running or self.random.random() < 0.3):
            self.reward()
            return
        if self.random.random() < self.losses:
            self.lose(sample or self.random.choice(self.running + self.unrewarded))
            return
        sample = sample or self.random.choice(self.running)
        uid, number = sample
        text = self.text[sample]
        more = self.length[sample] - len(text)
        made = self.random.randint(0, more) if stop or (stop is None and self.random.random() < 0.7) else more
        text += [self.version] * made
        if len(text) == self.length[sample]:
            self.running.remove(sample)
            self.scheduler.generate(uid, number, len(text), min(text))
            self.unrewarded.append(sample)
        elif stop:
            self.running.remove(sample)
            self.scheduler.interrupt(uid, number, len(text), min(text, default=None))

    def state(self, sample):
        uid, number = sample
        if uid not in self.scheduler.ledger:
            return None
        return self.scheduler.ledger.prompt(uid).samples[number].state

    def lose(self, sample):
        """Its worker dies; what it had told before is kept, and what it said since was told to nobody."""
        generated = sample in self.unrewarded
        (self.unrewarded if generated else self.running).remove(sample)
        self.scheduler.abandon(*sample)
        assert self.state(sample) in ("pending", None)
        if not generated:
            self.text[sample] = self.text[sample][: self.kept[sample]]

    def check(self, batch):
        assert batch.samples
        assert len(batch.samples) <= max(self.rules.batch_samples, SAMPLES)
        assert batch.lengths == sorted(batch.lengths) == [len(self.text[s]) for s in batch.samples]
        oldest = self.version - self.rules.max_staleness
        for sample, staleness in zip(batch.samples, batch.staleness, strict=True):
            assert sample not in self.trained, "trained twice"
            assert min(self.text[sample]) >= oldest
            assert staleness == self.version - min(self.text[sample])
            self.trained.append(sample)
        if self.rules.unit == "group":
            assert len(batch.samples) == SAMPLES * len({uid for uid, _ in batch.samples})
        self.batches.append(batch)


def drain(world, steps=60):
    """Train until everything that was loaded is consumed."""
    for _ in range(steps):
        if not len(world.scheduler.ledger) and world.batches:
            break
        world.step()
    assert not len(world.scheduler.ledger), "some prompts never had their turn"


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules_of, st.integers(0, 10**6), st.sampled_from([0.0, 0.02]))
def test_none_is_lost_and_none_is_trained_twice(rules, seed, mishaps):
    world = World(rules, seed, mishaps)
    drain(world)
    wanted = {(f"p{i}", j) for i in range(world.loads) for j in range(SAMPLES)}
    assert set(world.trained) | {s for s in wanted if s[0] in world.dropped} == wanted


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules_of, st.integers(0, 10**6), st.sampled_from([0.0, 0.02]), st.sampled_from([0.05, 0.3]))
def test_lost_and_late_attempts_lose_no_sample(rules, seed, mishaps, losses):
    world = World(rules, seed, mishaps, losses)
    drain(world, steps=300)
    wanted = {(f"p{i}", j) for i in range(world.loads) for j in range(SAMPLES)}
    assert set(world.trained) | {s for s in wanted if s[0] in world.dropped} == wanted


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules_of, st.integers(0, 10**6), st.integers(1, 8))
def test_loads_that_are_refilled_are_all_trained_when_training_ends(rules, seed, updates):
    """Prompts are here for so many updates at all times, and no more than will be trained."""
    rules = dataclasses.replace(rules, load="refill", harvest_tokens=None)
    world = World(rules, seed)
    for left in range(updates, 0, -1):
        world.step(left)
        here = world.scheduler.ledger.tally.untrained
        assert here + rules.batch_samples == min(rules.group_batches, left) * rules.batch_samples
    assert sorted(world.trained) == sorted((f"p{i}", j) for i in range(world.loads) for j in range(SAMPLES))
    assert len(world.trained) == updates * rules.batch_samples


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules_of, st.integers(0, 10**6))
def test_waiting_is_bounded(rules, seed):
    world = World(rules, seed)
    for _ in range(12):
        world.step()
    longest = max(max(batch.waited) for batch in world.batches)
    if rules.harvest_tokens is None:
        assert longest <= rules.group_batches - 1  # full batches only: a group is consumed in so many


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules_of, st.integers(0, 10**6), st.integers(0, 200), st.integers(1, 4))
def test_a_crash_at_any_event_resumes_from_the_checkpoint(rules, seed, crash_at, every):
    """What ran is begun anew, what was finished is still there; the checkpoint is what JSON keeps of it."""

    class Crash(Exception):
        pass

    class Mortal(World):
        events = 0

        def advance(self, *args, **kwargs):
            self.events += 1
            if self.events == crash_at:
                raise Crash
            super().advance(*args, **kwargs)

    world = Mortal(rules, seed)
    saved = None
    try:
        for step in range(8):
            world.step()
            if step % every == 0:
                kept = copy.deepcopy((world.text, world.length, world.trained, world.loads, world.version))
                saved = json.dumps(world.scheduler.state_dict()), kept
    except Crash:
        pass
    world = World(rules, seed + 1)
    if saved is not None:
        state, (world.text, world.length, world.trained, world.loads, world.version) = saved
        world.scheduler.load_state_dict(json.loads(state))
    drain(world)
    assert set(world.trained) == {(f"p{i}", j) for i in range(world.loads) for j in range(SAMPLES)}


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules_of, st.integers(0, 10**6), st.sampled_from([0.0, 0.3]))
def test_where_every_reward_fails_it_is_hopeless_before_long(rules, seed, losses):
    class Hopeless(Exception):
        pass

    class Failing(World):
        def fill(self, batches_left):
            if self.scheduler.hopeless():
                raise Hopeless
            assert self.loads < 400
            super().fill(batches_left)

    with pytest.raises(Hopeless):
        Failing(rules, seed, mishaps=1.0, losses=losses).step()


def scheduler(mode="on_policy", **rules):
    numbers = {"batch_prompts": 1, "batch_samples": 2, "group_batches": 3, "max_staleness": 1}
    built = Scheduler(named(mode, **{**numbers, **rules}))
    built.begin(0)
    for i in range(built.loadable()):
        built.load(f"p{i}", 2)
    built.dispatch()
    return built


def finish(built, uid, *lengths, version=0):
    for number, length in enumerate(lengths):
        built.generate(uid, number, length, version)
        built.finish(uid, number)


def test_harvest_takes_the_shortest_first():
    built = scheduler()
    finish(built, "p0", 30, 30)
    finish(built, "p2", 9, 11)
    batch = built.harvest()
    assert batch.samples == [("p2", 0), ("p2", 1)]
    assert batch.lengths == [9, 11]


def test_surplus_is_stale_after_the_update_on_policy_and_kept_in_partial_mode():
    for mode, stale in (("on_policy", [("p0", 0), ("p0", 1)]), ("partial", [])):
        built = scheduler(mode=mode)
        finish(built, "p0", 30, 30)
        finish(built, "p2", 9, 11)
        built.harvest()
        assert built.begin(1) == stale
        assert built.step.wasted_tokens == 30 * len(stale)
        assert built.ready() == (mode == "partial")


@pytest.mark.parametrize(("load", "trained"), [("group", ["p0", "p1"]), ("refill", ["p0", "p2", "p3"])])
def test_a_long_response_waits_for_the_load_or_where_that_is_refilled_for_ever(load, trained):
    """On-policy, the second prompt is long: it is cut short at each update, and passed by as long as others come."""
    built = scheduler(group_batches=2, load=load)
    loaded = 2
    for version, uid in enumerate(trained):
        built.begin(version)
        for _ in range(built.loadable()):
            built.load(f"p{loaded}", 2)
            loaded += 1
        built.dispatch()
        finish(built, uid, 5, 5, version=version)
        assert built.harvest().samples == [(uid, 0), (uid, 1)]
        for number in (0, 1) if uid != "p1" else ():
            built.interrupt("p1", number, 3, version)
    assert built.loadable() == (1 if load == "refill" else 2)


def test_no_prompt_is_loaded_before_all_are_consumed():
    built = scheduler(group_batches=2)
    for version, uid in enumerate(("p0", "p1")):
        assert built.loadable() == 0
        built.begin(version)
        built.dispatch() if version else None
        finish(built, uid, 5, 5, version=version)
        built.harvest()
        for _, number in [("p1", 0), ("p1", 1)] if version == 0 else []:
            built.interrupt("p1", number, 3, 0)
    assert built.loadable() == 2
    assert built.loadable(batches_left=1) == 1
    assert built.loadable(batches_left=0) == 0


def test_a_dropped_prompt_wastes_what_might_have_been_trained_and_nothing_twice():
    built = scheduler(unit="trajectory")
    finish(built, "p1", 5, 6)
    assert built.harvest().lengths == [5, 6]
    built.interrupt("p0", 0, 100, 0), built.interrupt("p0", 1, 30, 0)
    assert built.step.wasted_tokens == 130
    built.begin(1)
    built.dispatch()
    built.fail("p0")
    assert built.step.wasted_tokens == 0, "they were counted when they were cut short"
    built.generate("p2", 0, 7, 1), built.finish("p2", 0), built.generate("p2", 1, 9, 1)
    built.fail("p2")
    assert built.step.wasted_tokens == 16


def test_a_trained_sample_of_a_prompt_that_fails_later_is_not_wasted():
    built = scheduler(unit="trajectory")
    built.generate("p0", 0, 500, 0), built.finish("p0", 0)
    built.generate("p1", 0, 600, 0), built.finish("p1", 0)
    assert built.harvest().lengths == [500, 600]
    built.fail("p0")
    assert built.step.wasted_tokens == 0


def test_a_dropped_prompt_is_replaced_and_its_late_samples_are_nobodys():
    built = scheduler()
    built.generate("p0", 0, 5, 0)
    built.drop("p0")
    assert built.loadable() == 1
    built.generate("p0", 1, 5, 0)
    built.finish("p0", 0)
    built.interrupt("p0", 1, 5, 0)
    assert "p0" not in built.ledger
    assert built.step.wasted_tokens == 5
    built.load("p3", 2)
    assert built.loadable() == 0
    assert built.dispatch() == [("p3", 0), ("p3", 1)]


FAILURES = 16  # of a small batch


def replaced(built, failing):
    """Loads and starts what may be, and lets the prompts fail whose number ``failing`` holds."""
    for _ in range(built.loadable()):
        built.load(f"p{built.ledger.loaded}", 2)
    built.dispatch()
    for prompt in list(built.ledger):
        if failing(prompt.number):
            built.fail(prompt.uid)


def test_it_is_hopeless_when_as_many_fail_one_after_another_as_an_update_batch_has():
    for batch, failures in ((1, FAILURES), (20, 20)):
        built = scheduler(batch_prompts=batch, batch_samples=2 * batch)
        failed = 0
        while not built.hopeless():
            built.fail(next(iter(built.ledger)).uid)
            failed += 1
            replaced(built, lambda number: False)
        assert failed == failures == built.hopeless()


def test_a_prompt_that_hangs_does_not_hide_that_all_others_fail():
    built = scheduler()
    for _ in range(2 * FAILURES):
        replaced(built, lambda number: number != 7)
    assert "p7" in built.ledger
    assert built.hopeless()


def test_while_others_come_to_their_end_it_is_not_hopeless():
    built = scheduler(batch_prompts=20, batch_samples=40, group_batches=4)
    for round in range(4):
        replaced(built, lambda number: number % 2 == 0)  # at once, and those of the same age run on
        assert not built.hopeless(), round
    built = scheduler()
    for number in range(FAILURES - 1):
        replaced(built, lambda failing, number=number: failing == number)
    finish(built, f"p{FAILURES}", 5, 5)
    built.fail(f"p{FAILURES - 1}")
    assert not built.hopeless(), "one came to its end meanwhile"


def test_samples_that_finish_in_prompts_that_fail_are_no_success():
    built = scheduler()
    for number in range(FAILURES):
        finish(built, f"p{number}", 5)
        assert not built.hopeless()
        built.fail(f"p{number}")
        replaced(built, lambda number: False)
    assert built.hopeless()


def test_where_single_trajectories_are_trained_from_prompts_that_fail_it_goes_on():
    built = scheduler(unit="trajectory")
    for number in range(0, 3 * FAILURES, 2):
        finish(built, f"p{number}", 5)
        finish(built, f"p{number + 1}", 5)
        built.harvest()
        built.begin(0)
        built.fail(f"p{number}")
        built.fail(f"p{number + 1}")
        replaced(built, lambda number: False)
        assert not built.hopeless()


def test_prompts_start_in_the_order_of_loading_their_longest_samples_leading():
    built = scheduler()
    finish(built, "p0", 5, 5)
    built.harvest()
    built.interrupt("p1", 0, 0, None)
    built.interrupt("p1", 1, 20, 0)
    built.interrupt("p2", 0, 30, 0)
    built.generate("p2", 1, 8, 0)
    built.finish("p2", 1)
    built.begin(1)
    assert built.dispatch() == [("p1", 1), ("p1", 0), ("p2", 0), ("p2", 1)]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (lambda c: finish(c, "p0", 5) or c.finish("p0", 0), "cannot become finished: it is finished"),
        (lambda c: c.load("p0", 2), "p0 is loaded already"),
        (lambda c: c.harvest(), "ask ready"),
        (lambda c: Scheduler(named("partial", batch_prompts=1, batch_samples=1)), "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(event, message):
    with pytest.raises(ValueError, match=message):
        event(scheduler())


def test_engines_may_stop_before_the_rewards_are_known_unless_those_decide():
    built = scheduler()
    built.generate("p0", 0, 5, 0)
    built.generate("p0", 1, 5, 0)
    assert built.enough()
    assert not built.enough(rewarded=True)
    assert not built.ready()
    built.finish("p0", 0)
    built.finish("p0", 1)
    assert built.enough(rewarded=True)
    assert built.ready()


def test_a_late_judge_holds_no_engine_but_its_reward_is_waited_for():
    built = scheduler()
    built.generate("p0", 0, 5, 0)
    built.generate("p0", 1, 5, 0)
    built.finish("p0", 0)
    assert built.enough()
    assert not built.settled(29.0)
    assert built.settled(30.0)
    assert sorted(built.give_up()) == [("p1", 0), ("p1", 1), ("p2", 0), ("p2", 1)]  # still run, with engines stopped
    assert built.step.abandoned == 4
    assert not built.ready()
    assert not built.enough(rewarded=True)  # on with the engines
    assert len(built.dispatch()) == 4
    built.finish("p0", 1)
    assert built.ready()


def test_a_full_batch_does_not_wait_for_rewards_of_others():
    built = scheduler()
    finish(built, "p0", 5, 5)
    for number in range(2):
        built.generate("p1", number, 9, 0)
        built.interrupt("p2", number, 3, 0)
    assert built.settled(0.0)
    assert built.harvest().samples == [("p0", 0), ("p0", 1)]


def test_a_shorter_response_is_not_passed_by_because_its_reward_is_slow():
    built = scheduler()
    finish(built, "p0", 9, 9)
    for number in range(2):
        built.generate("p1", number, 5, 0)
        built.interrupt("p2", number, 3, 0)
    assert built.ready()
    assert not built.settled(29.0)
    assert built.settled(30.0)
    built.finish("p1", 0)
    built.finish("p1", 1)
    assert built.settled(0.0)
    assert built.harvest().samples == [("p1", 0), ("p1", 1)]


def test_an_attempt_that_may_still_ask_the_engines_is_waited_for_though_the_batch_is_full():
    built = scheduler()
    finish(built, "p0", 5, 5)
    for number in range(2):
        built.generate("p1", number, 9, 0)
    built.interrupt("p2", 0, 3, 0)
    assert not built.settled(29.0)
    assert built.settled(30.0)


def test_engines_go_on_at_once_where_no_reward_can_fill_the_batch():
    built = scheduler()
    built.drop("p0")  # its reward failed after the stop
    built.generate("p1", 0, 5, 0)
    for uid, number in (("p1", 1), ("p2", 0), ("p2", 1)):
        built.interrupt(uid, number, 3, 0)
    assert built.settled(0.0)
    assert not built.ready()


def test_a_response_whose_reward_comes_after_the_update_is_made_anew_on_policy_and_kept_in_partial_mode():
    for mode, state in (("on_policy", "pending"), ("partial", "generated")):
        built = scheduler(mode=mode)
        finish(built, "p0", 5, 5)
        built.generate("p1", 0, 7, 0)
        built.harvest()
        assert built.begin(1) == ([("p1", 0)] if mode == "on_policy" else [])
        assert built.ledger.prompt("p1").samples[0].state == state


def test_a_response_without_tokens_is_the_current_policys():
    built = scheduler()
    finish(built, "p0", 0, 0, version=None)
    batch = built.harvest()
    assert batch.lengths == [0, 0]
    assert batch.staleness == [0, 0]
