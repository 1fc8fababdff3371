"""Which pending samples may start, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile

from verl_rhyme.scheduling.ledger import Ledger
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import Prompt

#: Tokens: more are as good as these.
_MOST = 1 << 24


def startable(rules: Rules, ledger: Ledger, training: bool) -> Iterator[tuple[str, int]]:
    """(uid, number) of pending samples that can be trained before they get too stale. The ledger must not change while
    the iterator is read.

    The oldest batch first, in it the prompts that are expected longest (those of which nothing is known may be long);
    prompt by prompt, so that groups get complete; within a prompt those first that were longest when they were
    interrupted. No prompt begins between the collection of a batch and its policy, for it would be a version older when
    it is trained. What spans versions must fit into the batches of all updates that may still train it: no more prompts
    begin (AReaL's bound, arXiv:2505.24298), but for those that the next batch waits for, of which there may be some
    after a loss.

    Args:
        training: A batch was collected, and the policy that it makes is not there yet.
    """
    if training and rules.max_staleness == 0:
        return
    tally, room, seen = ledger.tally, float("inf"), set[int]()
    if rules.spans_versions and rules.max_staleness > 0:
        room = (rules.max_staleness + 1 - training) * rules.batch_samples - tally.begun
    if training and not rules.start_early:
        room = 0

    def awaited(prompt: Prompt) -> bool:
        return rules.take == "loaded" and ledger.place(prompt) < rules.batch_prompts

    pending: Iterable[Prompt] = (prompt for prompt in tally.prompts("pending") if not prompt.put_off)
    if room <= 0:  # the rest need not be ordered after every event
        pending = takewhile(awaited, pending)
    for prompt in _in_order(rules, ledger, pending):
        if room <= 0 and not awaited(prompt):
            break
        numbers = _longest_first(prompt)
        if not tally.has_begun(prompt):
            room -= len(numbers)
        for number in numbers:
            yield prompt.uid, number
        seen.add(prompt.number)
    begun = (prompt for prompt in tally.prompts("begun") if prompt.number not in seen and not prompt.put_off)
    for prompt in _in_order(rules, ledger, begun):
        for number in _longest_first(prompt):
            yield prompt.uid, number


def priority(rules: Rules, prompt: Prompt) -> int:
    """Place of a prompt's samples in an engine's queue, lowest first, from 1: as :func:`startable` has it, but that a
    prompt which moved up to an earlier batch, in place of one that was dropped, keeps its place here."""
    return 1 + prompt.number // rules.batch_prompts * (_MOST + 1) + int(_shorter(prompt))


def _in_order(rules: Rules, ledger: Ledger, prompts: Iterable[Prompt]) -> list[Prompt]:
    def place(prompt: Prompt) -> tuple[int, float, int]:
        number = ledger.place(prompt) if rules.take == "loaded" else prompt.number
        return number // rules.batch_prompts, _shorter(prompt), prompt.number

    return sorted(prompts, key=place)


def _shorter(prompt: Prompt) -> float:
    """From 0, of the longest, to :data:`_MOST`."""
    return _MOST - min(_MOST if prompt.expected is None else prompt.expected, _MOST)


def _longest_first(prompt: Prompt) -> list[int]:
    pending = [number for number, sample in enumerate(prompt.samples) if sample.state == "pending"]
    return sorted(pending, key=lambda number: -prompt.samples[number].tokens)
