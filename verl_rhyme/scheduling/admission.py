"""Selection and order of the pending samples that may start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile

from verl_rhyme.scheduling.ledger import Ledger
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.samples import Prompt

#: Maximum expected tokens that the order distinguishes.
_MOST = 1 << 24


def startable(rules: Rules, ledger: Ledger, training: bool) -> Iterator[tuple[str, int]]:
    """Yield (uid, number) of pending samples that can be trained before they are too stale.

    The ledger must not change meanwhile. The oldest batch comes first. Within it, prompts with the longest expected
    responses come first (unknown lengths count as long), prompt by prompt, so that groups complete. Within a prompt,
    samples that were longest at their interruption come first. ``training`` lasts from the collection of a batch to its
    policy; no prompt starts then, since it would be one version more stale. Samples that continue on separate engines
    must fit into the batches of all training steps that may train them: no more prompts start (AReaL's bound,
    arXiv:2505.24298). Exempt are prompts of the next batch, which can be pending after a loss.
    """
    if training and rules.max_staleness == 0:
        return
    tally, room, seen = ledger.tally, float("inf"), set[int]()
    if rules.separate and rules.continues and rules.max_staleness > 0:
        room = (rules.max_staleness + 1 - training) * rules.batch_samples - tally.begun
    if training and not rules.start_early:
        room = 0

    def awaited(prompt: Prompt) -> bool:
        return rules.take == "loaded" and ledger.place(prompt) < rules.batch_prompts

    pending: Iterable[Prompt] = (prompt for prompt in tally.prompts("pending") if not prompt.put_off)
    if room <= 0:  # sorting all prompts after every event is too slow
        pending = takewhile(awaited, pending)
    for prompt in _in_order(rules, ledger, pending):
        if room <= 0 and not awaited(prompt):
            break
        numbers = _longest_first(prompt)
        if not tally.part(prompt).begun:
            room -= len(numbers)
        for number in numbers:
            yield prompt.uid, number
        seen.add(prompt.number)
    begun = (prompt for prompt in tally.prompts("begun") if prompt.number not in seen and not prompt.put_off)
    for prompt in _in_order(rules, ledger, begun):
        for number in _longest_first(prompt):
            yield prompt.uid, number


def priority(rules: Rules, prompt: Prompt) -> int:
    """Return a prompt's place in an engine's queue, lowest first, from 1: the order of :func:`startable`.

    One exception: a prompt that moved up to an earlier batch, in place of a dropped one, keeps its place.
    """
    return 1 + prompt.number // rules.batch_prompts * (_MOST + 1) + int(_shorter(prompt))


def _in_order(rules: Rules, ledger: Ledger, prompts: Iterable[Prompt]) -> list[Prompt]:
    def place(prompt: Prompt) -> tuple[int, float, int]:
        number = ledger.place(prompt) if rules.take == "loaded" else prompt.number
        return number // rules.batch_prompts, _shorter(prompt), prompt.number

    return sorted(prompts, key=place)


def _shorter(prompt: Prompt) -> float:
    """Return 0 for the longest prompt, up to :data:`_MOST` for the shortest."""
    return _MOST - min(_MOST if prompt.expected is None else prompt.expected, _MOST)


def _longest_first(prompt: Prompt) -> list[int]:
    pending = [number for number, sample in enumerate(prompt.samples) if sample.state == "pending"]
    return sorted(pending, key=lambda number: -prompt.samples[number].tokens)
