"""Which pending samples may start, and in which order."""

from __future__ import annotations

from collections.abc import Iterator

from verl_rhyme.scheduling.ledger import Ledger
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import Prompt


def startable(rules: Rules, ledger: Ledger, training: bool) -> Iterator[tuple[str, int]]:
    """(uid, number) of pending samples that can be trained before they get too stale. Nothing may change meanwhile.

    Prompt by prompt as they were loaded, so that groups get complete and none waits for ever; within a prompt those
    first that were longest when they were cut short. What spans versions must fit into the batches of all updates
    that may still train it: no more prompts are begun (AReaL's bound, arXiv:2505.24298).

    Args:
        training: A batch was harvested, and the policy that it makes is not there yet.
    """
    if training and rules.max_staleness == 0 and not rules.draft_ahead:
        return
    tally, room, last = ledger.tally, float("inf"), -1
    if rules.spans_versions and rules.max_staleness > 0:
        room = (rules.max_staleness + 1 - training) * rules.batch_samples - tally.begun
    for prompt in tally.prompts("pending"):
        if room <= 0:
            break
        numbers = _longest_first(prompt)
        if not tally.has_begun(prompt):
            room -= len(numbers)
        for number in numbers:
            yield prompt.uid, number
        last = prompt.number
    else:
        return
    for prompt in tally.prompts("begun", after=last):
        for number in _longest_first(prompt):
            yield prompt.uid, number


def _longest_first(prompt: Prompt) -> list[int]:
    pending = [number for number, sample in enumerate(prompt.samples) if sample.state == "pending"]
    return sorted(pending, key=lambda number: -prompt.samples[number].tokens)
