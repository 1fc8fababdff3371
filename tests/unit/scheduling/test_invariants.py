"""What the pipeline promises, under random schedules: engines finish, fail and are interrupted at any moment."""

import contextlib
import copy
import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.unit.scheduling.worlds import SAMPLES, Separate, Stopping, World
from verl_rhyme.scheduling.rules import Rules

UPDATES = 12

checked = settings(max_examples=examples(100, slow=200))
seeds = st.integers(0, 10**6)
units = st.sampled_from(["group", "trajectory"])
batches = st.integers(1, 4)


def rules(batch, **given):
    if given.get("max_staleness") and given.get("refill") != "when_empty" and given.get("in_flight"):
        given["in_flight"] = min(given["in_flight"], given["max_staleness"] + 1)
    return Rules(batch, batch * SAMPLES, **given)


def drawn(**given):
    return st.builds(rules, st.integers(1, 4), **{name: _strategy(value) for name, value in given.items()})


def _strategy(value):
    return value if isinstance(value, st.SearchStrategy) else st.just(value)


bools = st.booleans()
in_flight = st.sampled_from([None, 1, 1.25, 1.5, 2, 3.5])
#: Tail batching; SortedRL on-policy; the pipeline; SortedRL partial; RhymeRL.
colocated = st.one_of(
    drawn(max_staleness=0, put_off=st.sampled_from([0.1, 0.9]), unit=units, separate=bools),
    drawn(max_staleness=0, in_flight=in_flight, unit=units),
    drawn(max_staleness=0, in_flight=st.sampled_from([1, 2, 4]), refill="when_empty", unit=units),
    drawn(max_staleness=st.integers(1, 4), in_flight=in_flight, unit=units),
    drawn(max_staleness=st.integers(1, 3), in_flight=st.sampled_from([2, 4]), refill="when_empty", unit=units),
    drawn(max_staleness=st.integers(0, 3), take="loaded"),
)
separate = st.one_of(
    drawn(
        max_staleness=st.integers(1, 4),
        in_flight=in_flight,
        unit=units,
        relayed=bools,
        start_early=bools,
        separate=True,
    ),
    drawn(max_staleness=0, unit=units, relayed=bools, separate=True),
    drawn(max_staleness=st.integers(0, 3), take="loaded", relayed=bools, separate=True),
)
finishing = drawn(
    max_staleness=st.integers(1, 3),
    in_flight=in_flight,
    unit=units,
    relayed=True,
    at_version="finish",
    separate=True,
)


def wanted(world):
    return {(f"p{number}", sample) for number in range(world.loads) for sample in range(SAMPLES)}


@checked
@example(rules(3, refill="when_empty", unit="trajectory"), 1, 0.0, 0.3, 8)  # a batch's end within a prompt
@example(rules(1, max_staleness=0, put_off=0.1, unit="trajectory"), 16789, 0.02, 0.0, 6)  # a dropped one's rest
@given(colocated, seeds, st.sampled_from([0.0, 0.02]), st.sampled_from([0.0, 0.05, 0.3]), st.integers(1, UPDATES))
def test_stopped_engines_each_sample_is_trained_once_within_the_bound(rules, seed, mishaps, losses, updates):
    world = Stopping(rules, seed, mishaps, losses)
    for left in range(updates, 0, -1):
        world.step(left)
    done = set(world.trained) | {sample for sample in wanted(world) if sample[0] in world.dropped}
    assert done == wanted(world) or (world.dropped and rules.unit == "trajectory")
    if not mishaps:
        assert len(world.trained) == updates * rules.batch_samples


@checked
@given(colocated, seeds, st.integers(1, UPDATES))
def test_prompts_of_uneven_groups_come_to_their_end(rules, seed, updates):
    world = Stopping(rules, seed, uneven=True)
    for left in range(updates, 0, -1):
        if not len(world.scheduler.ledger) and not world.scheduler.batches_left and world.batches:
            break
        world.step(left)


@checked
@given(
    st.sampled_from([0.0, 0.3]),
    units,
    seeds,
    st.integers(1, 8),
    st.integers(1, 3),
    st.sampled_from([{"max_staleness": 0}, {"max_staleness": 2}, {"max_staleness": 0, "put_off": 0.3}]),
)
def test_a_run_resumes_under_other_rules_and_with_fewer_updates(put_off, unit, seed, before, left, other):
    """Put-off prompts of tail batching are trained, whatever is left of the run."""
    world = Stopping(rules(4, max_staleness=0, in_flight=1.5, put_off=put_off, unit=unit), seed)
    for step in range(before):
        world.step(20 - step)
    resumed = Stopping(rules(4, unit=unit, **other), seed + 1)
    finished = [(p.uid, number) for p, number, _ in world.scheduler.ledger.samples("finished")]
    resumed.text, resumed.length = {sample: world.text[sample] for sample in finished}, world.length
    resumed.loads, resumed.version = world.loads, world.version
    resumed.scheduler.load_state_dict(json.loads(json.dumps(world.scheduler.state_dict())))
    for updates in range(left, 0, -1):
        resumed.step(updates)
    assert len(resumed.trained) == left * 4 * SAMPLES


@checked
@given(colocated, seeds)
def test_no_more_prompts_are_in_flight_than_the_rules_say(rules, seed):
    """Tail batching holds fewer than two batches beyond them: those that wait for a round of their own."""
    world = Stopping(rules, seed)
    for _ in range(UPDATES):
        world.step()
        waiting = sum(world.scheduler.ledger.put_off.values())
        assert world.scheduler.ledger.tally.untrained - waiting <= rules.batches * rules.batch_samples
        assert waiting == 0 or (rules.rounds and waiting <= (rules.batches + 1) * rules.batch_samples)


@checked
@given(batches, seeds, units, st.sampled_from([0.0, 0.15, 0.5]), st.sampled_from([1.25, 1.5, 2]))
def test_in_tail_batching_no_prompt_waits_for_long(batch, seed, unit, put_off, in_flight):
    """It is put off once, and trained when a batch of those that were is complete."""
    world = Stopping(rules(batch, max_staleness=0, in_flight=in_flight, put_off=put_off, unit=unit), seed)
    for _ in range(3 * UPDATES):
        world.step()
    waited = max(max(done.waited) for done in world.batches)
    assert waited <= batch * (SAMPLES if unit == "trajectory" else 1) + 1 + in_flight  # a round puts one off, at least


@checked
@given(colocated, seeds, st.integers(0, 200), st.integers(1, 4))
def test_a_crash_of_stopping_engines_resumes_from_the_checkpoint(rules, seed, crash_at, every):
    class Crash(Exception):
        pass

    class Mortal(Stopping):
        events = 0

        def advance(self, *args, **kwargs):
            self.events += 1
            if self.events == crash_at:
                raise Crash
            super().advance(*args, **kwargs)

    world, saved = Mortal(rules, seed), None
    left = UPDATES
    with contextlib.suppress(Crash):
        for step in range(UPDATES - 4):
            world.step(UPDATES - step)
            if step % every == 0:
                kept = copy.deepcopy((world.text, world.length, world.trained, world.loads, world.version))
                saved, left = (json.dumps(world.scheduler.state_dict()), kept), UPDATES - step - 1
    world = Stopping(rules, seed + 1)
    if saved is not None:
        state, (world.text, world.length, world.trained, world.loads, world.version) = saved
        world.scheduler.load_state_dict(json.loads(state))
        for prompt, number, sample in world.scheduler.ledger.samples("pending"):  # text of those that ran is lost
            del world.text.get((prompt.uid, number), [])[sample.tokens :]
    for updates in range(left, 0, -1):
        world.step(updates)
    assert set(world.trained) == wanted(world)


@checked
@given(separate, seeds, st.booleans(), st.sampled_from([0.0, 0.02]), st.sampled_from([0.0, 0.05, 0.3]))
def test_separate_engines_each_sample_is_trained_once_within_the_bound(rules, seed, uneven, mishaps, losses):
    world = Separate(rules, seed, uneven=uneven, mishaps=mishaps, losses=losses, updates=UPDATES)
    world.run()
    world.check_all()
    if rules.max_staleness == 0:
        assert world.ahead == 0
    if (
        rules.continues
        and not (uneven or losses or mishaps)
        and world.limit is None
        and rules.batches <= rules.max_staleness + 1
    ):
        assert world.scheduler.step.stale == 0, "more was started than could be trained in time"


@checked
@given(finishing, seeds, st.booleans(), st.booleans(), st.sampled_from([0.0, 0.02]), st.sampled_from([0.0, 0.1]))
def test_responses_that_finish_first_are_trained_once_within_the_bound(rules, seed, uneven, lag, mishaps, losses):
    world = World(rules, seed, uneven=uneven, lag=lag, mishaps=mishaps, losses=losses, updates=UPDATES)
    world.run()
    world.check_all()


@checked
@given(st.one_of(separate, finishing), seeds, st.integers(0, 200))
def test_a_crash_of_separate_engines_resumes_from_the_checkpoint(rules, seed, crash_at):
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
            kept = (text, self.length, self.trained, self.sizes, self.loads, self.weights, self.left)
            self.saved = json.dumps(self.scheduler.state_dict()), copy.deepcopy(kept)

    dead = Mortal(rules, seed, updates=UPDATES)
    with contextlib.suppress(Crash):
        dead.run()
    world = World(rules, seed + 1, updates=UPDATES)
    if dead.saved is not None:
        state, kept = dead.saved
        world.text, world.length, world.trained, world.sizes, world.loads, world.weights, world.left = kept
        world.scheduler.load_state_dict(json.loads(state))
        world.replicas = [world.weights] * 3
        for sample in world.scheduler.begin(world.weights, world.left):
            world.end(sample)
    world.run()
    world.check_all()


@settings(checked, max_examples=50)
@given(st.sampled_from([1, 2, 3, 4, 6]), seeds)
def test_the_mean_staleness_is_that_of_the_batches_in_flight(bound, seed):
    """By Little's law: n - 1 versions, with lengths that do not differ too much (here: by a fortieth of an update)."""
    made = rules(4, max_staleness=bound, separate=True)
    world = Separate(made, seed, updates=40)
    world.run()
    ages = world.staleness[10:-10]
    assert max(ages) <= bound
    assert sum(ages) / len(ages) <= made.batches - 1 + 0.5
