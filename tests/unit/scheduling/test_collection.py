"""The content of an update batch."""

import sys

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.unit.scheduling.worlds import SAMPLES, Separate, Stopping
from verl_rhyme.scheduling.collection import batch
from verl_rhyme.scheduling.ledger import Ledger
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.scheduler import Scheduler


def test_a_batch_has_the_samples_that_later_batches_cannot_hold_then_those_loaded_first():
    """The example of the module, with the oldest samples loaded last."""
    rules, ledger = Rules(4, 4, max_staleness=2, unit="trajectory"), Ledger("trajectory")
    for number, version in enumerate([7, 7, 7, 6, 6, 6, 6, 6, 5]):
        ledger.load(f"p{number}", 1)
        sample = ledger.move(f"p{number}", 0, "finished", restored=True)
        sample.tokens, sample.first_version = 10, version

    def taken(reserved=()):
        return [prompt.uid for prompt, _ in batch(rules, ledger, 7, "finished", reserved=reserved)]

    assert taken() == ["p8", "p3", "p0", "p1"]
    assert taken(reserved=["p6", "p2"]) == ["p8", "p6", "p2", "p0"]


# ---- reservations ----


def defined(rules, ledger, version, uids, reserved):
    """What :func:`reservable` returns, by its definition: each sample is counted by itself, anew at each call."""
    finished = [p for uid in uids if uid in ledger and (p := ledger.prompt(uid)).complete("finished")]
    if rules.take == "loaded":
        return [prompt.uid for prompt in finished if ledger.place(prompt) < rules.batch_prompts]
    oldest = [version - rules.max_staleness + later for later in range(rules.max_staleness)]
    held = [(sample, prompt) for prompt in ledger for sample in prompt.samples if sample.state != "trained"]
    versions = [_version(rules, sample, prompt) for sample, prompt in held]
    room = [(-1, rules.batch_samples)]
    for later, last in enumerate(oldest):
        due = sum(v is not None and v <= last for v in versions) - later * rules.batch_samples
        room.append((last, rules.batch_samples - min(due, rules.batch_samples)))
    found = []
    for prompt in [*map(ledger.prompt, reserved), *finished]:
        own = [_version(rules, sample, prompt) for sample in prompt.samples]
        less = [(last, left - sum(v > last for v in own)) for last, left in room]
        if prompt.uid in reserved or all(left >= 0 for _, left in less):
            room = less
            found.append(prompt.uid)
    return [uid for uid in found if uid not in reserved]


def _version(rules, sample, prompt):
    of = [sample] if rules.unit == "trajectory" else [each for each in prompt.samples if each.state != "trained"]
    return min((each.oldest_version for each in of if each.oldest_version is not None), default=None)


class Streamed:
    """A world whose trainer takes parts, and whose filter drops finished groups."""

    reservations, finished = 0, ()

    def fill(self):
        super().fill()
        scheduler, ledger = self.scheduler, self.scheduler.ledger
        for prompt in list(ledger):
            if prompt.uid in self.finished or not prompt.complete("finished"):
                continue
            if self.random.random() < 0.1:
                scheduler.drop(prompt.uid)
                self.dropped.add(prompt.uid)
            else:
                self.finished = [*self.finished, prompt.uid]
        super().fill()
        self.finished = [uid for uid in self.finished if uid in ledger]
        if not scheduler._training and self.random.random() < 0.7:
            waiting = [uid for uid in self.finished if uid not in scheduler._reserved]
            wanted = defined(self.rules, ledger, scheduler.version, waiting, list(scheduler._reserved))
            assert scheduler.reserve(waiting) == wanted
            self.reservations += len(wanted)


class StreamedSeparate(Streamed, Separate):
    def collect(self):
        reserved = set(self.scheduler._reserved)
        before = len(self.trained)
        super().collect()
        assert reserved <= {uid for uid, _ in self.trained[before:]}


class StreamedStopping(Streamed, Stopping):
    pass


@settings(max_examples=examples(100, slow=400))
@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.sampled_from(["group", "trajectory"]),
    st.sampled_from(["finished", "loaded"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
@example(2, 1, "group", "finished", True, True, 0)  # a reserved group of two, and one of four that cannot wait
def test_reservations_follow_their_definition(k, batch_prompts, unit, take, separate, uneven, seed):
    unit = "group" if take == "loaded" else unit
    rules = Rules(
        batch_prompts, batch_prompts * SAMPLES, max_staleness=k, unit=unit, take=take, separate=separate and k > 0
    )
    if rules.separate:
        world = StreamedSeparate(rules, seed, uneven=uneven, mishaps=0.02, losses=0.05, updates=8)
        world.run()
        return
    world = StreamedStopping(rules, seed, uneven=uneven, mishaps=0.02, losses=0.05)
    for left in range(8, 0, -1):
        if not len(world.scheduler.ledger) and not world.scheduler.batches_left and world.batches:
            break
        world.step(left)


def test_a_reservation_costs_a_few_calls_a_group_however_large_groups_are():
    """512 groups of 64 wait while older samples hold the room, and ask again at each finished group."""
    groups, samples = 512, 64
    rules = Rules(groups, groups * samples, max_staleness=1, separate=True)
    scheduler = Scheduler(rules)
    scheduler.begin(1)
    for number in range(2 * groups):
        scheduler.load(f"p{number}", samples)
    scheduler.dispatch()
    for number in range(groups + 8):
        for sample in range(samples):
            scheduler.generate(f"p{number}", sample, 10, 1)
            scheduler.finish(f"p{number}", sample)
    uids = [f"p{number}" for number in range(groups + 8)]
    assert len(scheduler.reserve(uids[:8])) == 8
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        scheduler.reserve(uids[8:], samples=groups * samples)
    finally:
        sys.setprofile(None)
    assert calls < 16 * groups
