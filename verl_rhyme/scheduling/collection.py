"""Which update batch could be taken: is there enough for one, what must it not pass by, what is in it.

An update takes so many samples and no more, so that of those that become too stale in the next few updates some must be
trained earlier, or the last batch that may train them has no room for all: of the samples that may be trained in this
update and k more at the latest, all that k batches cannot hold are due now (earliest deadline first).

Say a batch takes 4 samples, ``max_staleness`` is 2, and version 7 is trained. One sample has a token of version 5, five
have none older than 6, and the rest are of 7. The one of version 5 is due, for at the next update it is past the bound.
Of the six that go by 5 or 6 the next batch can hold four, so that two are due: that one, and another. The batch is
then, in this order: the one of version 5, the first loaded of version 6, the first loaded of the others, until there
are 4.

What the trainer was promised, because it works on it already, comes before the others; no more is promised than leaves
room for what is due.

Where batches are taken as they were loaded (``Rules.take``), what is due comes first by itself: no more is begun
than the batches before the bound can hold, and it is begun in the same order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import islice

from verl_rhyme.scheduling.ledger import Ledger
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import Prompt, State

#: What is trained together: samples of a prompt, by number.
_Bundle = tuple[Prompt, list[int]]


def suffices(rules: Rules, ledger: Ledger, owed: int, rewarded: bool) -> bool:
    """What is generated or finished makes a batch: a full one, or all that is left.

    Args:
        owed: Prompts that are yet to be loaded.
        rewarded: Count only what is finished.
    """
    tally = ledger.tally
    if rules.take == "loaded":
        first = list(islice(ledger, rules.batch_prompts))
        if not first or (len(first) < rules.batch_prompts and owed > 0):  # others are yet to come
            return False
        lacking: tuple[State, ...] = ("pending", "running", "generated") if rewarded else ("pending", "running")
        return all(next((p.number for p in tally.prompts(s)), math.inf) > first[-1].number for s in lacking)
    samples = sum((tally.rewarded if rewarded else tally.trainable).values())
    left = owed * rules.batch_samples // rules.batch_prompts + tally.untrained - sum(ledger.put_off.values())
    return 0 < samples >= min(rules.batch_samples, left)


def awaits(rules: Rules, ledger: Ledger, version: int, rewarded: bool) -> bool:
    """Something that must not be passed by is not generated yet; or (``rewarded``) it is not finished."""
    tally = ledger.tally
    there = tally.rewarded if rewarded else tally.trainable
    return any(_until(there, last) < due for last, due in _due(rules, version, tally.held))


def promisable(
    rules: Rules, ledger: Ledger, version: int, uids: Iterable[str], promised: Collection[str] = ()
) -> list[str]:
    """Of these prompts, in this order, those that the next update batch can have whatever else comes: all their samples
    are finished, and it has room for them beside what is due and what was promised before."""
    finished = [p for uid in uids if uid in ledger and (p := ledger.prompt(uid)).complete("finished")]
    if rules.take == "loaded":
        return [prompt.uid for prompt in finished if ledger.place(prompt) < rules.batch_prompts]
    # by stage, so many samples that have no token of its version or older find room beside those that are due
    room = [(last, rules.batch_samples - due) for last, due in _due(rules, version, ledger.tally.held)]
    room.append((-1, rules.batch_samples))
    found: list[str] = []
    for prompt in [ledger.prompt(uid) for uid in promised] + finished:
        whole = list(range(len(prompt.samples)))
        oldest = [_oldest(prompt, whole if rules.unit == "group" else [number]) for number in whole]
        less = [(last, left - sum(version > last for version in oldest)) for last, left in room]
        if prompt.uid in promised or all(left >= 0 for _, left in less):
            room = less
            found.append(prompt.uid)
    return [uid for uid in found if uid not in promised]


def batch(
    rules: Rules, ledger: Ledger, version: int, *states: State, promised: Collection[str] = ()
) -> list[tuple[Prompt, int]]:
    """The update batch, were it taken of what is in these states: what is due, what was promised, then what was loaded
    first, of that which is finished or of all."""
    if rules.take == "loaded":
        return [
            (prompt, number)
            for prompt in islice(ledger, rules.batch_prompts)
            for number, sample in enumerate(prompt.samples)
            if sample.state in states
        ]
    bundles = sorted(_bundles(rules, ledger, *states), key=lambda b: (b[0].uid not in promised, b[0].number, b[1]))
    stages: dict[int, int] = {}
    for stage, (last, due) in enumerate(_due(rules, version, ledger.tally.held)):
        there = [i for i, bundle in enumerate(bundles) if _oldest(*bundle) <= last]
        due -= sum(len(bundles[i][1]) for i in there if i in stages)
        for i in there:
            if due > 0 and i not in stages:
                stages[i] = stage
                due -= len(bundles[i][1])
    taken: list[tuple[Prompt, int]] = []
    for i in sorted(range(len(bundles)), key=lambda i: (stages.get(i, rules.max_staleness), i)):
        prompt, numbers = bundles[i]
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


def _oldest(prompt: Prompt, numbers: list[int]) -> int:
    versions = (prompt.samples[number].oldest_version for number in numbers)
    return min(version for version in versions if version is not None)


def _due(rules: Rules, version: int, held: Counter[int]) -> list[tuple[int, int]]:
    """For this update and each later one but the last of those that may train what is made now: samples with a token
    of that version or older that have to be in this batch. In the module's example: (5, 1) and (6, 2)."""
    due = []
    for later in range(rules.max_staleness):
        last = version - rules.max_staleness + later
        due.append((last, min(_until(held, last) - later * rules.batch_samples, rules.batch_samples)))
    return due


def _until(samples: Counter[int], last: int) -> int:
    return sum(count for version, count in samples.items() if version <= last)
