"""Tools and rewards that raise: outages, broken prompts, flaky services; in virtual time, over the real state machines.

The service of :class:`World` answers a sample after its generation. What it does is each test's.
"""

import heapq
import itertools
import math
import random

import pytest

from tests.unit.scheduling.reports import (
    A0,
    A1,
    B0,
    B1,
    ON_POLICY,
    PARTIAL,
    failed,
    finished,
    generated,
    restored,
    rollout,
    send,
    states,
    through,
)
from verl_rhyme.scheduling.attempts import AttemptReport
from verl_rhyme.scheduling.retries import (
    BROKEN_S,
    HANG_TRIES,
    LONGEST_PAUSE_S,
    PAUSE_S,
    REPLACE_S,
    TRIES,
    Retries,
    RolloutError,
)
from verl_rhyme.scheduling.rollout import Rollout
from verl_rhyme.scheduling.rules import Rules

OUTAGE_S = 900.0
SAMPLES = 4
#: Seconds from the first failure of a sample to its last, if others succeed.
ALL_TRIES_S = PAUSE_S * (2 ** (TRIES - 1) - 1)


class World:
    """Engines, a trainer and a service: ``service(uid, number, now)`` returns an error or ``None``."""

    def __init__(self, service, batch=16, seconds=(1.0, 5.0), seed=0, broken=False, **rules):
        self.service, self.batch, self.seconds, self.broken = service, batch, seconds, broken
        self.random, self.now, self.steps, self.attempts = random.Random(seed), 0.0, 0, 0
        self.rollout = Rollout(Rules(batch, batch * SAMPLES, **rules), outage_s=OUTAGE_S)
        self.rollout.publish(0, None)
        self.wakes = -1.0
        self.data, self.failed, self.trained, self.steps_at = itertools.count(), 0, [], []
        self.events, self.order, self.running = [], itertools.count(), set()

    @property
    def loaded(self):
        return self.rollout.scheduler.ledger.loaded

    def later(self, seconds, call, *arguments):
        heapq.heappush(self.events, (self.now + seconds, next(self.order), call, arguments))

    def go(self):
        made = self.rollout
        made.add_prompts((f"p{next(self.data)}", SAMPLES) for _ in range(made.missing_prompts()))
        for start in made.fill(None, 1, self.now):
            self.attempts += 1
            self.running.add(start.attempt)
            self.later(self.random.uniform(*self.seconds), self.generated, start.attempt)
        if (at := made.retries.next_start()) is not None and not self.now < self.wakes <= at:
            self.wakes = max(at, self.now + 0.05)
            self.later(self.wakes - self.now, lambda: None)
        if made.scheduler.ready():
            batch = made.take()
            self.failed += batch.failed
            self.trained += batch.collected.samples
            self.steps += 1
            self.steps_at.append(self.now)
            made.publish(self.steps, None)
            self.running -= {*made.pop_abandoned()}
            self.go()

    def generated(self, attempt):
        if attempt in self.running:
            self.rollout.ended(generated(attempt, version=self.steps), self.now)
            self.later(0.1, self.answered, attempt)

    def answered(self, attempt):
        if attempt not in self.running:
            return
        self.running.discard(attempt)
        error = self.service(*attempt.sample, self.now)
        if error is None:
            return self.rollout.ended(finished(attempt), self.now)
        self.rollout.ended(AttemptReport(attempt, "failed", 5, 0, error=error, broken=self.broken), self.now)
        self.running -= {*self.rollout.pop_abandoned()}

    def run(self, seconds=math.inf, steps=math.inf):
        end = self.now + seconds
        self.go()
        while self.steps < steps:
            at = self.events[0][0]
            if at > end:
                self.now = end
                break
            self.now, _, call, arguments = heapq.heappop(self.events)
            call(*arguments)
            self.go()
        assert len(set(self.trained)) == len(self.trained), "trained twice"
        return self


def outage(begin, seconds):
    return lambda uid, number, now: "ConnectionError: refused" if begin <= now < begin + seconds else None


@pytest.mark.parametrize(("batch", "seconds"), [(16, 5.0), (16, 300.0), (64, 300.0)])
def test_an_outage_pauses_the_run_and_costs_no_prompt(batch, seconds):
    world = World(outage(7.0, seconds), batch, max_staleness=1).run(7.0 + seconds)
    in_flight = math.ceil(world.rollout.rules.batches) * batch
    assert world.loaded <= (world.steps + 2) * batch <= 2 * in_flight + 2 * batch, "the data are consumed"
    probes = world.attempts
    world.run(LONGEST_PAUSE_S + 40.0)
    assert world.steps_at[-1] > 7.0 + seconds, "it does not go on"
    assert world.failed == 0
    assert probes <= world.loaded * SAMPLES + 12 * seconds


def test_pauses_grow_and_few_samples_probe_an_outage():
    world = World(outage(0.0, math.inf), 256, max_staleness=1).run(120.0)
    began = world.attempts
    world.run(600.0)
    assert 10 * 8 <= world.attempts - began <= 60 * 8
    assert world.loaded == 2 * 256


@pytest.mark.parametrize("batch", [1, 64])
def test_an_outage_without_an_end_ends_the_run_after_its_limit(batch):
    world = World(outage(100.0, math.inf), batch, max_staleness=1)
    words = r"no sample succeeds: \d+ samples failed in the last 1[56] min, and the latest success was 1[56] min ago"
    with pytest.raises(RolloutError, match=words) as raised:
        world.run(4000.0)
    assert "The first failure: sample " in str(raised.value)
    assert "ConnectionError: refused" in str(raised.value)
    assert "scheduling.outage_timeout" in str(raised.value)
    assert 100.0 + OUTAGE_S <= world.now <= 105.0 + OUTAGE_S + 2 * LONGEST_PAUSE_S


@pytest.mark.parametrize(("broken", "limit"), [(True, BROKEN_S), (False, OUTAGE_S)])
def test_wrong_code_ends_a_run_soon_if_nothing_ever_succeeded(broken, limit):
    """A judge that still loads raises too, but other errors."""
    world = World(lambda *_: "NameError: scoer", broken=broken)
    with pytest.raises(RolloutError, match=r"and no sample has succeeded since the start\. .*NameError: scoer"):
        world.run(4000.0)
    assert limit <= world.now <= limit + 5.0 + 2 * LONGEST_PAUSE_S
    assert world.loaded == 2 * 16


def test_errors_of_wrong_code_after_a_success_may_be_those_of_an_outage():
    """A judge that is away may answer with a page that the reward cannot read."""
    world = World(outage(20.0, 600.0), broken=True).run(800.0)
    assert world.steps_at[-1] > 620.0
    resumed = World(lambda *_: "NameError: scoer", broken=True)
    resumed.rollout.publish(1, None)
    resumed.run(OUTAGE_S - 1.0)


@pytest.mark.parametrize("rules", [{}, {"max_staleness": 1}, {"max_staleness": 0, "drafts": False}], ids=str)
def test_a_broken_prompt_is_replaced_and_delays_no_batch_for_long(rules):
    world = World(lambda uid, number, now: "ValueError: no answer" if (uid, number) == ("p3", 1) else None, **rules)
    world.run(steps=6)
    assert world.failed == 1
    assert not any(uid == "p3" for uid, _ in world.trained)
    assert "p3" not in world.rollout.scheduler.ledger
    # Where a batch needs every prompt, nothing else succeeds in the end.
    assert world.steps_at[-1] < 6 * 6.0 + max(REPLACE_S, ALL_TRIES_S) + TRIES * 6.0
    [warning] = world.rollout.pop_warnings()
    assert "another prompt replaces" in warning
    assert "sample 1 of prompt p3: ValueError: no answer" in warning


def test_broken_prompts_that_are_left_alone_do_not_block_the_batch():
    """Nothing else is in progress, so that nothing succeeds: is it an outage? Prompts that replace them show it."""
    broken = {"p1", "p2", "p3"}
    world = World(lambda uid, number, now: "no" if uid in broken else None, batch=4, max_staleness=0, in_flight=1)
    world.run(steps=3)
    assert world.failed == 3
    assert world.now < 3 * REPLACE_S + 2 * ALL_TRIES_S + 60.0


def test_an_outage_costs_a_tiny_run_few_prompts():
    world = World(outage(20.0, 600.0), batch=1, max_staleness=0).run(700.0)
    assert world.failed <= 3
    assert world.steps_at[-1] > 620.0


def test_a_reward_that_fails_now_and_then_costs_few_prompts():
    chance = random.Random(1)
    world = World(lambda *_: "TimeoutError" if chance.random() < 0.3 else None, 64, max_staleness=1)
    world.run(steps=40)
    assert world.failed <= 0.02 * world.loaded
    assert world.attempts < 2 * world.loaded * SAMPLES


def test_a_poisoned_sample_does_not_end_a_run_whose_others_are_slow():
    world = World(lambda uid, number, now: "KeyError" if uid == "p3" and now < 1300 else None, broken=True)
    world.seconds = (1200.0, 1500.0)
    world.go()
    for attempt in [attempt for attempt in world.running if attempt.uid == "p3"]:
        world.rollout.ended(generated(attempt), 0.0)
        world.answered(attempt)
    world.run(steps=1)
    assert world.failed == 0


def test_training_is_no_outage():
    """On the same devices nothing succeeds while the actor trains; rewards that come then may fail."""
    made = rollout(prompts=[("a", 2), ("b", 2)], in_flight=2)
    made.retries._outage_s = OUTAGE_S
    through(made, A0, A1)
    send(made, generated(B0), generated(B1))
    made.take()
    made.ended(failed(B0), 10.0)
    made.ended(failed(B1), 2000.0)
    made.publish(1, None)
    assert len(made.fill(now=2001.0)) >= 1


@pytest.mark.parametrize("others", [True, False])
def test_a_prompt_of_a_tool_that_hangs_is_replaced_sooner(others):
    """Each try takes an hour (``scheduling.tool_timeout``), in which other samples succeed or the batch waits."""
    made = rollout(prompts=[("a", 2), ("b", 2)], in_flight=2)
    made.retries._outage_s = OUTAGE_S
    if not others:
        through(made, A1, B0, B1)
    for hour in (1, 2):
        [again] = [attempt for attempt in made.attempts() if attempt.sample == ("a", 0)]
        if others:
            made.retries.succeeded(("b", 0), 3600.0 * hour - 1.0)
        made.ended(AttemptReport(again, "failed", tries=HANG_TRIES), 3600.0 * hour)
        made.fill(now=3600.0 * hour + 60.0)
    assert "a" not in made.scheduler.ledger


def test_a_failed_sample_continues_from_its_text():
    made = rollout(mode={"max_staleness": 1}, prompts=[("a", 2)])
    send(made, failed(A0, 3), generated(A1), failed(A1))
    assert states(made) == ["pending", "pending"]
    assert made.fill(now=0.5) == []
    assert made.retries.next_start() == PAUSE_S
    starts = made.fill(now=PAUSE_S)
    assert [(start.predecessor, start.partial) for start in starts] == [(A1, True), (A0, True)]
    assert (made.content.kept_tokens("a", 0), made.content.kept_tokens("a", 1)) == (3, 5)


def test_a_sample_that_cannot_start_is_no_fault_of_its_prompt():
    made, now = rollout(mode={"max_staleness": 1}, prompts=[("a", 2), ("b", 2)]), 0.0
    for _ in range(3 * TRIES):
        send(made, *(AttemptReport(attempt, "lost") for attempt in made.attempts()))
        now += 2 * LONGEST_PAUSE_S
        assert made.fill(now=now)
    assert "a" in made.scheduler.ledger


@pytest.mark.parametrize("mode", [ON_POLICY, PARTIAL])
def test_groups_without_a_trajectory_start_once_more_and_are_replaced(mode):
    """The model draws the same again; only a tool may answer otherwise."""
    made, now = rollout(mode, prompts=[("a", 2), ("b", 2)]), 0.0
    for _ in range(2):
        assert "a" in made.scheduler.ledger
        for attempt in [attempt for attempt in made.attempts() if attempt.uid == "a"]:
            made.ended(generated(attempt, 0), now)
            made.ended(finished(attempt, empty=True), now)
        made.retries.succeeded(("b", 0), now)
        now += 2 * ALL_TRIES_S
        assert all(start.predecessor is None for start in made.fill(now=now))
    assert "a" not in made.scheduler.ledger
    assert made.state_dict()["failed"] == 1


def test_where_no_agent_loop_gives_a_trajectory_the_run_ends():
    made = Rollout(Rules(4, 8), outage_s=OUTAGE_S)
    made.publish(0, None)
    made.add_prompts([(f"p{number}", 2) for number in range(8)])

    def finish_all(now):
        for start in made.fill(now=now):
            made.ended(generated(start.attempt, 0), now)
            made.ended(finished(start.attempt, empty=True), now)

    for now in range(0, int(BROKEN_S), 5):
        finish_all(now)
    with pytest.raises(RolloutError, match="the agent loop returned no trajectory"):
        list(map(finish_all, range(int(BROKEN_S), int(BROKEN_S + LONGEST_PAUSE_S), 5)))


def test_failures_of_a_sample_are_counted_over_a_restart():
    made, now = rollout(prompts=[("a", 2), ("b", 2)], mode={"max_staleness": 1}, in_flight=2), 0.0
    for tries in range(1, TRIES):
        [again] = [attempt for attempt in made.attempts() if attempt.sample == ("a", 0)]
        made.ended(failed(again, 0), now)
        assert made.state_dict()["failures"] == [["a", 0, tries]]
        made, _ = restored(made, {}, prompts="ab")
        now += 100.0
        made.fill(now=now)
    [again] = [attempt for attempt in made.attempts() if attempt.sample == ("a", 0)]
    made.ended(failed(again, 0), now)
    assert "a" not in made.scheduler.ledger


def test_a_lone_sample_with_a_slow_tool_is_tried_as_often_as_others():
    """At the end of an on-policy batch nothing else is in progress; two failures 15 minutes apart are no outage."""
    retries = Retries(outage_s=900.0)
    sample = ("last", 0)
    for at in range(TRIES - 1):
        assert retries.failed(sample, "the tests ran too long", 1000.0 * at, 0, broken=False, tries=1)
    assert not retries.failed(sample, "the tests ran too long", 1000.0 * TRIES, 0, broken=False, tries=1)
    with pytest.raises(RolloutError, match="no sample succeeds"):
        retries.failed(("next", 0), "and so on", 1000.0 * (TRIES + 1), 0, broken=False, tries=1)
