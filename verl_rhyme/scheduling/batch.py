"""Which update batch could be taken: is there enough for one, what must it not pass by, what is in it."""

from __future__ import annotations

from verl_rhyme.scheduling.ledger import Ledger
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import Prompt, Sample, State

#: What is trained together: samples of a prompt, by number.
_Bundle = tuple[Prompt, list[int]]


def suffices(rules: Rules, ledger: Ledger, owed: int, rewarded: bool) -> bool:
    """What is generated or finished makes a batch: a full one, or of enough tokens, or all that is left.

    Args:
        owed: Prompts that are yet to be loaded in place of those that were dropped.
        rewarded: Count only what is finished.
    """
    tally = ledger.tally
    samples, tokens = tally.rewarded if rewarded else tally.trainable
    left = owed * rules.batch_samples // rules.batch_prompts + tally.samples.total() - tally.samples["trained"]
    if samples >= min(rules.batch_samples, left):
        return samples > 0
    return rules.harvest_tokens is not None and samples > 0 and tokens >= rules.harvest_tokens


def awaits(rules: Rules, ledger: Ledger, version: int, *states: State) -> bool:
    """Something in one of these states must not be passed by: see :func:`_protected`."""
    tally = ledger.tally
    for state in states:
        first = next(tally.prompts(state), None)  # none has waited longer
        if first is None:
            continue
        if rules.max_wait is not None and first.waited >= rules.max_wait:
            return True
        if _due(rules, version, tally.oldest(state)):
            return True
    return False


def batch(rules: Rules, ledger: Ledger, version: int, *states: State) -> list[tuple[Prompt, int]]:
    """The update batch, were it taken of what is in these states: what is protected first, then the shortest."""

    def precedence(bundle: _Bundle) -> tuple[bool, int, float, int]:
        prompt, numbers = bundle
        samples = [prompt.samples[number] for number in numbers]
        protected = _protected(rules, version, prompt, samples)
        length = sum(sample.tokens for sample in samples) / len(samples)
        return (not protected, prompt.number if protected else 0, length, prompt.number)

    taken: list[tuple[Prompt, int]] = []
    for prompt, numbers in sorted(_bundles(rules, ledger, *states), key=precedence):
        if len(taken) + len(numbers) <= rules.batch_samples or not taken:
            taken += [(prompt, number) for number in numbers]
    return taken


def _bundles(rules: Rules, ledger: Ledger, *states: State) -> list[_Bundle]:
    """What can be trained of that which is in these states: whole groups, or single trajectories."""
    if rules.unit == "trajectory":
        return [(prompt, [number]) for state in states for prompt, number, _ in ledger.samples(state)]
    found = {prompt.number: prompt for state in states for prompt in ledger.tally.prompts(state)}
    whole = (found[number] for number in sorted(found))
    return [(prompt, list(range(len(prompt.samples)))) for prompt in whole if prompt.complete(*states)]


def _protected(rules: Rules, version: int, prompt: Prompt, samples: list[Sample]) -> bool:
    """The next harvest must not pass by what is trained together: it waited long enough, or would be too stale then."""
    if rules.max_wait is not None and prompt.waited >= rules.max_wait:
        return True
    return _due(rules, version, min((s.oldest_version for s in samples if s.oldest_version is not None), default=None))


def _due(rules: Rules, version: int, oldest: int | None) -> bool:
    """A token of this version is too stale after the next update; on-policy all are, and none is waited for."""
    return rules.max_staleness > 0 and oldest is not None and oldest <= version - rules.max_staleness
