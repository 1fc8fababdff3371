"""What is counted as samples change is what the ledger comes to when it is gone through whole."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from worlds import SAMPLES, Separate, World

from verl_rhyme.scheduling.admission import startable
from verl_rhyme.scheduling.batch import awaits, suffices
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import ON_THEIR_WAY
from verl_rhyme.scheduling.scheduler import Scheduler

rules_of = st.builds(
    lambda batch, on_interrupt, staleness, draft_ahead, **rules: Rules(
        batch,
        batch * SAMPLES,
        on_interrupt=on_interrupt,
        max_staleness=0 if on_interrupt == "regenerate" else staleness,
        through_training=True,
        draft_ahead=draft_ahead and on_interrupt == "regenerate",
        **rules,
    ),
    batch=st.integers(1, 4),
    on_interrupt=st.sampled_from(["regenerate", "continue", "keep_running"]),
    staleness=st.integers(1, 3),
    draft_ahead=st.booleans(),
    group_batches=st.integers(1, 4),
    unit=st.sampled_from(["group", "trajectory"]),
    harvest_tokens=st.sampled_from([None, 60]),
    max_wait=st.sampled_from([None, 1, 2]),
)


class Plain:
    """The definitions, each of which goes through all samples."""

    def __init__(self, scheduler):
        self.rules, self.version, self.training = scheduler.rules, scheduler.version, scheduler._training
        self.prompts, self.owed = list(scheduler.ledger), scheduler._owed

    def samples(self, *states):
        return [(p, n, s) for p in self.prompts for n, s in enumerate(p.samples) if s.state in states]

    def startable(self):
        rules, pending = self.rules, self.samples("pending")
        pending.sort(key=lambda at: (at[0].number, -at[2].tokens, at[1]))
        if self.training and rules.max_staleness == 0 and not rules.draft_ahead:
            return []
        flying = [prompt.uid for prompt, _, _ in self.samples(*ON_THEIR_WAY, "finished")]
        begun, admitted, room = set(flying), [], float("inf")
        if rules.runs_on and rules.max_staleness:
            room = (rules.max_staleness + 1 - self.training) * rules.batch_samples - len(flying)
        for prompt, number, _ in pending:
            if room > 0 or prompt.uid in begun:
                begun.add(prompt.uid)
                admitted.append((prompt.uid, number))
                room -= 1
        return admitted

    def awaits(self, *states):
        return any(self.protected(prompt, sample) for prompt, _, sample in self.samples(*states))

    def protected(self, prompt, sample):
        rules = self.rules
        if rules.max_wait is not None and prompt.waited >= rules.max_wait:
            return True
        together = prompt.samples if rules.unit == "group" else [sample]
        versions = [s.oldest_version for s in together if s.oldest_version is not None]
        return rules.max_staleness > 0 and bool(versions) and min(versions) <= self.version - rules.max_staleness

    def suffices(self, *states):
        rules = self.rules
        if rules.unit == "group":
            units = [s for prompt in self.prompts if prompt.complete(*states) for s in prompt.samples]
        else:
            units = [sample for _, _, sample in self.samples(*states)]
        left = self.owed * rules.batch_samples // rules.batch_prompts
        left += len(self.samples("pending", *ON_THEIR_WAY, "finished"))
        if len(units) >= min(rules.batch_samples, left):
            return len(units) > 0
        return (
            rules.harvest_tokens is not None
            and len(units) > 0
            and (sum(sample.tokens for sample in units) >= rules.harvest_tokens)
        )


def check(scheduler):
    plain, tally = Plain(scheduler), scheduler.ledger.tally
    rules, ledger, version = scheduler.rules, scheduler.ledger, scheduler.version
    for state in ("pending", "running", "generated", "finished", "trained"):
        assert list(ledger.samples(state)) == plain.samples(state)
        assert tally.samples[state] == len(plain.samples(state))
    assert list(startable(rules, ledger, plain.training)) == plain.startable()
    for rewarded, states in ((False, ("generated", "finished")), (True, ("finished",))):
        assert suffices(rules, ledger, plain.owed, rewarded) == plain.suffices(*states)
    for states in (("running",), ON_THEIR_WAY):
        assert awaits(rules, ledger, version, *states) == plain.awaits(*states)


def checked(kind):
    class Checked(kind):
        def event(self):
            super().event()
            check(self.scheduler)

        def harvest(self):
            super().harvest()
            check(self.scheduler)
            restored = Scheduler(self.rules)
            restored.load_state_dict(json.loads(json.dumps(self.scheduler.state_dict())))
            check(restored)

    return Checked


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(rules_of, st.integers(0, 10**6), st.sampled_from([0.0, 0.02]), st.sampled_from([0.0, 0.1]), st.booleans())
def test_the_tally_is_what_the_whole_ledger_says(rules, seed, mishaps, losses, uneven):
    kind = World if rules.runs_on else Separate
    world = checked(kind)(rules, seed, mishaps=mishaps, losses=losses, uneven=uneven)
    world.run(20)
