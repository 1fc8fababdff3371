"""Which pending samples may start, and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from verl_rhyme.scheduling.ledger import Ledger
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import Prompt

#: Tokens: more are as good as these.
_MOST = 1 << 24


def startable(rules: Rules, ledger: Ledger, training: bool) -> Iterator[tuple[str, int]]:
    """(uid, number) of pending samples that can be trained before they get too stale. Nothing may change meanwhile.

    Prompt by prompt, so that groups get complete: as they were loaded, or by the length that is expected of them
    (:data:`~verl_rhyme.scheduling.rules.StartOrder`). None waits for ever, for nothing is loaded before all of a load
    are trained. Within a prompt those first that were longest when they were cut short. What spans versions must fit
    into the batches of all updates that may still train it: no more prompts are begun (AReaL's bound,
    arXiv:2505.24298).

    Args:
        training: A batch was harvested, and the policy that it makes is not there yet.
    """
    if training and rules.max_staleness == 0 and not rules.draft_ahead:
        return
    tally, room, seen = ledger.tally, float("inf"), set[int]()
    if rules.spans_versions and rules.max_staleness > 0:
        room = (rules.max_staleness + 1 - training) * rules.batch_samples - tally.begun
    for prompt in _in_order(rules, tally.prompts("pending")):
        if room <= 0:
            break
        numbers = _longest_first(prompt)
        if not tally.has_begun(prompt):
            room -= len(numbers)
        for number in numbers:
            yield prompt.uid, number
        seen.add(prompt.number)
    else:
        return
    for prompt in _in_order(rules, tally.prompts("begun")):
        if prompt.number not in seen:
            for number in _longest_first(prompt):
                yield prompt.uid, number


def priority(rules: Rules, prompt: Prompt) -> int:
    """Place of a prompt's samples in an engine's queue, lowest first, from 1: the order of :func:`startable`."""
    if rules.start_order == "load":
        return prompt.number + 1
    if rules.start_order == "shortest":
        return 1 + (_MOST if prompt.expected is None else min(int(prompt.expected), _MOST))
    return 1 + (0 if prompt.expected is None else _MOST - min(int(prompt.expected), _MOST))


def _in_order(rules: Rules, prompts: Iterable[Prompt]) -> Iterable[Prompt]:
    """Of which nothing is expected come first where the longest do, for they may be long, and else last."""
    if rules.start_order == "load":
        return prompts
    sign = -1 if rules.start_order == "longest" else 1
    return sorted(prompts, key=lambda p: (sign * (math.inf if p.expected is None else p.expected), p.number))


def _longest_first(prompt: Prompt) -> list[int]:
    pending = [number for number, sample in enumerate(prompt.samples) if sample.state == "pending"]
    return sorted(pending, key=lambda number: -prompt.samples[number].tokens)
