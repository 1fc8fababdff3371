"""A lost scheduler is restored from its saved state and from newer evidence."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from tests.unit.scheduling.worlds import Separate, World, rules_of
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.scheduler import Scheduler


class Witness(Scheduler):
    """Records loads, drops, and the latest report of each attempt, as its worker leaves it."""

    def __init__(self, rules):
        super().__init__(rules)
        self.prompts, self.known = [], {}

    def load(self, uid, samples):
        super().load(uid, samples)
        self.prompts.append(("load", (uid, samples)))
        self.known |= {(uid, number): (-1, "pending", 0, None) for number in range(samples)}

    def drop(self, uid):
        super().drop(uid)
        self.prompts.append(("drop", (uid,)))

    def dispatch(self, *args):
        started = super().dispatch(*args)
        for uid, number in started:
            sample = self.ledger.prompt(uid).samples[number]
            self.known[uid, number] = (sample.attempt, "running", sample.tokens, sample.first_version)
        return started

    def generate(self, uid, number, tokens, first_version):
        self._end(uid, number, "generated", tokens, first_version)
        return super().generate(uid, number, tokens, first_version)

    def interrupt(self, uid, number, tokens, first_version):
        self._end(uid, number, "pending", tokens, first_version)
        return super().interrupt(uid, number, tokens, first_version)

    def finish(self, uid, number):
        super().finish(uid, number)
        attempt, _, *text = self.known[uid, number]
        self.known[uid, number] = (attempt, "finished", *text)

    def abandon(self, uid, number):
        super().abandon(uid, number)
        attempt, _, *text = self.known[uid, number]
        self.known[uid, number] = (attempt, "pending", *text)

    def begin(self, version, batches_left=None):
        stale = super().begin(version, batches_left)
        for sample in stale:
            self._ended(*sample)
        return stale

    def _end(self, uid, number, state, *text):
        self.known[uid, number] = (self.known[uid, number][0], state, *text)

    def _ended(self, uid, number):
        """It was ended; its text remains unless it was running."""
        attempt, _, tokens, _ = self.known[uid, number]
        self.known[uid, number] = (attempt, "pending", tokens, None)

    def again(self, saved, prompts):
        """Return another one from the state saved when so many prompts had been loaded or dropped."""
        restored = Scheduler(self.rules)
        restored.load_state_dict(json.loads(saved))
        for event, arguments in self.prompts[prompts:]:
            getattr(restored, event)(*arguments)
        restored.batches_left = self.batches_left
        if restored.version != self.version:
            restored.begin(self.version, self.batches_left)
        for (uid, number), (attempt, state, tokens, first_version) in self.known.items():
            if uid in self.ledger and restored.ledger.prompt(uid).samples[number].state == "pending":
                restored.restore(uid, number, attempt, state, tokens, first_version)
        witness = Witness(self.rules)
        vars(witness).update({**vars(restored), "prompts": list(self.prompts), "known": dict(self.known)})
        return witness


def facts(scheduler):
    return [
        (prompt.uid, prompt.number, prompt.waited, sample.state, sample.attempt, sample.tokens, sample.first_version)
        for prompt in scheduler.ledger
        for sample in prompt.samples
    ]


def mortal(kind):
    class Mortal(kind):
        """Its scheduler may die at any event; the saved state is from the last batch or later."""

        def __init__(self, rules, seed, **kwargs):
            super().__init__(rules, seed, **kwargs)
            self.scheduler = Witness(rules)
            self.scheduler.begin(0, self.left)
            self.save()

        def save(self):
            self.saved = json.dumps(self.scheduler.state_dict()), len(self.scheduler.prompts)

        def event(self):
            super().event()
            if self.random.random() < 0.05:
                self.save()
            if self.random.random() < 0.05:
                dead, self.scheduler = self.scheduler, self.scheduler.again(*self.saved)
                assert facts(self.scheduler) == facts(dead)
                assert self.scheduler.loadable() == dead.loadable()
                assert self.scheduler.has_batch() >= dead.has_batch()  # what runs may be older than is known

        def collect(self):
            super().collect()
            self.save()

    return Mortal


@settings(max_examples=examples(100, slow=300))
@given(rules_of, st.integers(0, 10**6), st.sampled_from([0.0, 0.02]), st.sampled_from([0.0, 0.1]))
def test_saved_state_and_newer_evidence_restore_a_lost_scheduler(rules, seed, mishaps, losses):
    kind = World if rules.finishes else Separate
    if rules.stops:  # here nothing stops: as though all had been interrupted
        rules = replace(rules, in_flight=1)
    world = mortal(kind)(rules, seed, mishaps=mishaps, losses=losses, updates=10)
    world.run()
    world.check_all()


def scheduler(at_version="regenerate", max_staleness=0):
    rules = {"max_staleness": max_staleness, "in_flight": 4, "refill": "when_empty"}
    built = Scheduler(Rules(1, 2, at_version=at_version, separate=True, relayed=True, **rules))
    built.begin(3)
    for number in range(built.loadable()):
        built.load(f"p{number}", 2)
    return built


def sample(built, uid="p0", number=0):
    found = built.ledger.prompt(uid).samples[number]
    return found.state, found.attempt, found.tokens, found.first_version


def test_an_interrupted_text_is_kept_where_it_may_continue():
    for first_version, kept in ((3, 3), (2, 2), (1, None)):
        built = scheduler("continue", max_staleness=1)
        assert built.restore("p0", 0, 4, "pending", 7, first_version) == (kept is not None)
        assert sample(built) == ("pending", 4, 7, kept)
    built = scheduler()
    assert not built.restore("p0", 0, 4, "pending", 7, 3)
    assert sample(built) == ("pending", 4, 7, None)
    assert built.dispatch()[0] == ("p0", 0)
    assert sample(built)[1] == 5


def test_samples_that_became_too_stale_are_regenerated():
    for state in ("generated", "finished"):
        built = scheduler()
        assert not built.restore("p0", 0, 0, state, 7, 2)
        assert sample(built) == ("pending", 0, 7, None)
        assert built.step.wasted_tokens == 7
        assert built.restore("p0", 1, 0, state, 7, 3)
        assert sample(built, number=1) == (state, 0, 7, 3)
    built = scheduler("finish", max_staleness=1)
    assert not built.restore("p0", 0, 0, "running", 7, 1)
    assert sample(built) == ("pending", 0, 7, None)


def test_a_running_sample_has_the_version_of_its_kept_tokens_until_it_reports():
    built = scheduler("finish", max_staleness=2)
    assert built.restore("p0", 0, 1, "running", 7, 2)
    assert built.restore("p0", 1, 0, "running", 0, None)
    assert [sample.oldest_version for sample in built.ledger.prompt("p0").samples] == [2, 3]
    assert built.dispatch()[0] == ("p1", 0), "it would run twice"
