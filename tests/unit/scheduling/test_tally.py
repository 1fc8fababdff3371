"""The tally equals the counts of the whole ledger after every change."""

import json
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.scheduling.worlds import Separate, World, rules_of
from verl_rhyme.scheduling.admission import startable
from verl_rhyme.scheduling.collection import fills_batch, lacks_due
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import IN_PROGRESS
from verl_rhyme.scheduling.scheduler import Scheduler


class Plain:
    """The definitions, each of which goes through all samples."""

    def __init__(self, scheduler):
        self.rules, self.version, self.training = scheduler.rules, scheduler.version, scheduler._training
        self.prompts, self.owed = list(scheduler.ledger), scheduler.loadable()

    def samples(self, *states):
        return [(p, n, s) for p in self.prompts for n, s in enumerate(p.samples) if s.state in states]

    def startable(self):
        rules, pending = self.rules, self.samples("pending")
        batch = rules.batch_prompts
        pending.sort(key=lambda at: (at[0].number // batch, at[0].number, -at[2].tokens, at[1]))
        if self.training and rules.max_staleness == 0:
            return []
        room = float("inf")
        if rules.separate and rules.continues and rules.max_staleness:
            begun = [p for p in self.prompts if self.begun(p)]
            room = (rules.max_staleness + 1 - self.training) * rules.batch_samples
            room -= sum(s.state != "trained" for p in begun for s in p.samples)
        if self.training:
            room = 0
        admitted = set()
        for prompt in self.prompts:
            if self.begun(prompt):
                admitted.add(prompt.uid)
            elif room > 0 and (waiting := [s for s in prompt.samples if s.state == "pending"]):
                admitted.add(prompt.uid)
                room -= len(waiting)
        return [(prompt.uid, number) for prompt, number, _ in pending if prompt.uid in admitted]

    def begun(self, prompt):
        return any(
            s.state in (*IN_PROGRESS, "finished") or (s.state == "pending" and s.first_version is not None)
            for s in prompt.samples
        )

    def lacks_due(self, rewarded):
        rules, there = self.rules, ("finished",) if rewarded else ("finished", "generated")
        for batches in range(rules.max_staleness):  # that follow on this one before they are too stale
            last = self.version - rules.max_staleness + batches
            if rules.unit == "group":
                old = [p.samples for p in self.prompts if self.oldest(p.samples) <= last]
            else:
                untrained = self.samples("pending", *IN_PROGRESS, "finished")
                old = [[s] for _, _, s in untrained if self.oldest([s]) <= last]
            left = sum(len(unit) for unit in old) - batches * rules.batch_samples
            got = sum(len(unit) for unit in old if all(s.state in there for s in unit))
            if got < min(left, rules.batch_samples):
                return True
        return False

    def oldest(self, samples):
        return min((s.oldest_version for s in samples if s.oldest_version is not None), default=float("inf"))

    def fills_batch(self, *states):
        rules = self.rules
        if rules.unit == "group":
            units = [s for prompt in self.prompts if prompt.complete(*states) for s in prompt.samples]
        else:
            units = [sample for _, _, sample in self.samples(*states)]
        left = self.owed * rules.batch_samples // rules.batch_prompts
        left += len(self.samples("pending", *IN_PROGRESS, "finished"))
        return 0 < len(units) >= min(rules.batch_samples, left)


def check(scheduler):
    plain, tally = Plain(scheduler), scheduler.ledger.tally
    rules, ledger, version = scheduler.rules, scheduler.ledger, scheduler.version
    for state in ("pending", "running", "generated", "finished", "trained"):
        assert list(ledger.samples(state)) == plain.samples(state)
        assert tally.samples[state] == len(plain.samples(state))
    assert list(startable(rules, ledger, plain.training)) == plain.startable()
    for rewarded, states in ((False, ("generated", "finished")), (True, ("finished",))):
        assert fills_batch(rules, ledger, plain.owed, rewarded) == plain.fills_batch(*states)
        assert lacks_due(rules, ledger, version, rewarded) == plain.lacks_due(rewarded)


def checked(kind):
    class Checked(kind):
        def event(self):
            super().event()
            check(self.scheduler)

        def collect(self):
            super().collect()
            check(self.scheduler)
            restored = Scheduler(self.rules)
            restored.load_state_dict(json.loads(json.dumps(self.scheduler.state_dict())))
            check(restored)

    return Checked


@settings(max_examples=60)
@given(rules_of, st.integers(0, 10**6), st.sampled_from([0.0, 0.02]), st.sampled_from([0.0, 0.1]), st.booleans())
def test_the_tally_equals_the_counts_of_the_whole_ledger(rules, seed, mishaps, losses, uneven):
    kind = World if rules.finishes else Separate
    if rules.stops:
        rules = replace(rules, in_flight=1)
    world = checked(kind)(rules, seed, mishaps=mishaps, losses=losses, uneven=uneven, updates=10)
    world.run()


def lines_of_an_event(samples, **rules):
    """Lines that are run for the end of a response, its reward and what starts in its place."""
    scheduler = Scheduler(Rules(samples // 64, samples // 4, in_flight=4, refill="when_empty", **rules))
    scheduler.begin(0)
    for number in range(scheduler.loadable()):
        scheduler.load(f"p{number}", 16)
    started = scheduler.dispatch(samples // 2)
    for uid, number in started[: samples // 8]:
        scheduler.generate(uid, number, 5, 0)
        scheduler.finish(uid, number)
    scheduler.dispatch(samples // 2)
    scheduler.has_batch()
    lines = 0

    def count(frame, event, _):
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        scheduler.generate(*started[-1], 5, 0)
        scheduler.has_batch()
        scheduler.finish(*started[-1])
        scheduler.has_batch(rewarded=True)
        assert scheduler.dispatch(samples // 2, min_starts=2) == []
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize(
    "rules",
    [
        {"max_staleness": 0},
        {"max_staleness": 0, "unit": "trajectory"},
        {"max_staleness": 2, "separate": True},
        {"max_staleness": 3, "separate": True, "relayed": True, "at_version": "finish"},
    ],
)
def test_the_cost_of_an_event_does_not_depend_on_the_size(rules):
    assert lines_of_an_event(8192, **rules) <= 1.1 * lines_of_an_event(256, **rules)
