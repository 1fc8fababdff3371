"""The content of an update batch: whether it is complete, which samples it must not leave out, and what it contains.

A batch has a fixed number of samples. So some samples that become too stale in the next few training steps must be
trained earlier: otherwise the last batch that may train them has no room. Consider the samples that may be trained in
this training step and at most k more. Those that k batches cannot hold must be trained in this batch (earliest deadline
first).

Example: a batch takes 4 samples, ``max_staleness`` is 2, and version 7 is trained. One sample has a token of version 5,
five have oldest tokens of version 6, and the rest are of version 7. The sample of version 5 must be trained in this
batch, for the next training step exceeds the bound. The next batch can hold four of the six samples of versions 5 and
6. So two must be trained now: that one, and another. The batch then takes, in this order: the sample of version 5, the
first loaded sample of version 6, and the first loaded of the others, until it has 4.

Samples reserved for streamed parts come before the others, since the trainer already works on them. A reservation
always leaves room for the samples that must be trained in this batch.

Where batches are taken in loading order (``Rules.take``), the samples with the nearest deadline come first anyway. No
more samples start than the batches before the bound can hold, and they start in the same order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice

from verl_rhyme.scheduling.ledger import Ledger
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import Prompt, State

#: Samples that are trained together: prompt and numbers in the group.
_Bundle = tuple[Prompt, range]


def fills_batch(rules: Rules, ledger: Ledger, to_load: int, rewarded: bool) -> bool:
    """Return whether the generated (``rewarded``: finished) samples fill a batch, or are all that is left.

    ``to_load`` counts the prompts that may still be loaded.
    """
    tally = ledger.tally
    if rules.take == "loaded":
        first = list(islice(ledger, rules.batch_prompts))
        if not first or (len(first) < rules.batch_prompts and to_load > 0):  # other prompts are still to be loaded
            return False
        lacking: tuple[State, ...] = ("pending", "running", "generated") if rewarded else ("pending", "running")
        return all(next((p.number for p in tally.prompts(s)), math.inf) > first[-1].number for s in lacking)
    samples = sum((tally.rewarded if rewarded else tally.trainable).values())
    left = to_load * rules.batch_samples // rules.batch_prompts + tally.untrained - sum(ledger.put_off.values())
    return 0 < samples >= min(rules.batch_samples, left)


def lacks_due(rules: Rules, ledger: Ledger, version: int, rewarded: bool) -> bool:
    """Return whether a sample that must be trained in this batch is not generated, or (``rewarded``) not finished."""
    tally = ledger.tally
    available = tally.rewarded if rewarded else tally.trainable
    return any(_until(available, last) < due for last, due in _must_train(rules, version, tally.held))


def reservable(
    rules: Rules, ledger: Ledger, version: int, uids: Iterable[str], reserved: Collection[str] = ()
) -> list[str]:
    """Return the prompts, in the given order, that can be reserved for streamed parts of the next batch.

    All their samples are finished, and the batch has room for them in addition to earlier reservations and to the
    samples that must be trained in it.
    """
    tally = ledger.tally
    waiting = [ledger.prompt(uid) for uid in uids if uid in ledger and uid not in reserved]
    finished = [(p, part.rewarded) for p in waiting if (part := tally.part(p)).finished == len(p.samples)]
    if rules.take == "loaded":
        return [prompt.uid for prompt, _ in finished if ledger.place(prompt) < rules.batch_prompts]
    taken: Counter[int] = Counter()  # reserved samples by version
    for uid in reserved:
        for oldest, count in tally.part(ledger.prompt(uid)).rewarded.items():
            taken[oldest] += count
    # per stage: room for samples without a token of its version or older, next to those that must be trained
    stages = [(-1, 0), *_must_train(rules, version, tally.held)]
    room = [(last, rules.batch_samples - due - _after(taken, last)) for last, due in stages]
    found: list[str] = []
    refused: dict[int, int] = {}
    for prompt, versions in finished:
        if versions == refused:  # the room does not grow
            continue
        less = [(last, left - _after(versions, last)) for last, left in room]
        if min(left for _, left in less) >= 0:
            room = less
            found.append(prompt.uid)
        else:
            refused = versions
    return found


def batch(
    rules: Rules, ledger: Ledger, version: int, *states: State, reserved: Collection[str] = ()
) -> list[tuple[Prompt, int]]:
    """Return the update batch of samples in these states: those that must be trained, reserved ones, loading order."""
    taken = _taken(rules, ledger, version, *states, reserved=reserved)
    return [
        (prompt, number) for prompt, numbers in taken for number in numbers if prompt.samples[number].state in states
    ]


def is_rewarded(rules: Rules, ledger: Ledger, version: int, reserved: Collection[str] = ()) -> bool:
    """Return whether the update batch of generated and finished samples (:func:`batch`) has only finished ones."""
    tally = ledger.tally
    return all(
        "generated" not in tally.part(prompt).samples
        if len(numbers) == len(prompt.samples)
        else prompt.samples[numbers.start].state == "finished"
        for prompt, numbers in _taken(rules, ledger, version, "generated", "finished", reserved=reserved)
    )


def _taken(
    rules: Rules, ledger: Ledger, version: int, *states: State, reserved: Collection[str] = ()
) -> Iterator[_Bundle]:
    """Yield the content of :func:`batch`; where it is taken in loading order, whole prompts."""
    if rules.take == "loaded":
        yield from ((prompt, range(len(prompt.samples))) for prompt in islice(ledger, rules.batch_prompts))
        return
    bundles = _bundles(rules, ledger, *states)
    bundles.sort(key=lambda b: (b[0].uid not in reserved, b[0].number, b[1].start))
    stages: dict[int, int] = {}
    for stage, (last, due) in enumerate(_must_train(rules, version, ledger.tally.held)):
        if due <= 0:
            continue
        old = [i for i, (prompt, numbers) in enumerate(bundles) if _oldest(rules, ledger, prompt, numbers) <= last]
        due -= sum(len(bundles[i][1]) for i in old if i in stages)
        for i in old:
            if due > 0 and i not in stages:
                stages[i] = stage
                due -= len(bundles[i][1])
    left = rules.batch_samples
    # Groups of unequal sizes may exceed the batch: the trainer works on the reserved ones, and the others cannot wait.
    first = {i: len(bundles) for i, (prompt, _) in enumerate(bundles) if prompt.uid in reserved} | stages
    rest = (i for i in range(len(bundles)) if i not in first)
    for i in (*sorted(first, key=lambda i: (first[i], i)), *rest):
        prompt, numbers = bundles[i]
        if i in first or len(numbers) <= left or left == rules.batch_samples:
            left -= len(numbers)
            yield prompt, numbers


def _bundles(rules: Rules, ledger: Ledger, *states: State) -> list[_Bundle]:
    if rules.unit == "trajectory":
        return [(prompt, range(number, number + 1)) for state in states for prompt, number, _ in ledger.samples(state)]
    tally, wanted = ledger.tally, {*states}
    found = {prompt.number: prompt for state in states for prompt in tally.prompts(state)}
    whole = [prompt for prompt in found.values() if tally.part(prompt).samples.keys() <= wanted]
    return [(prompt, range(len(prompt.samples))) for prompt in whole]


def _oldest(rules: Rules, ledger: Ledger, prompt: Prompt, numbers: range) -> int:
    if rules.unit == "group":
        return min(ledger.tally.part(prompt).trainable)
    return prompt.samples[numbers.start].known_version


def _must_train(rules: Rules, version: int, held: Counter[int]) -> list[tuple[int, int]]:
    """Return, for this and each later training step within the bound, the samples that must be trained in this batch.

    Each entry is (version, number of samples with a token of that version or older). In the module's example: (5, 1)
    and (6, 2). The last training step that may train new samples has no entry.
    """
    due = []
    for later in range(rules.max_staleness):
        last = version - rules.max_staleness + later
        due.append((last, min(_until(held, last) - later * rules.batch_samples, rules.batch_samples)))
    return due


def _until(samples: Mapping[int, int], last: int) -> int:
    return sum(count for version, count in samples.items() if version <= last)


def _after(samples: Mapping[int, int], last: int) -> int:
    return sum(count for version, count in samples.items() if version > last)
