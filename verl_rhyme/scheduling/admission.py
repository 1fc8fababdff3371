"""Which pending samples may start, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile

from verl_rhyme.scheduling.ledger import Ledger
from verl_rhyme.scheduling.rules import Rules, StartOrder
from verl_rhyme.scheduling.samples import Prompt

#: Tokens: more are as good as these.
_MOST = 1 << 24

#: Of each order by length a prompt's place, from 0 to :data:`_MOST`, by the tokens that are expected of it. Those of
#: which nothing is known come as :data:`_MOST`: they may be long.
_PLACE: Mapping[StartOrder, Callable[[float], float]] = {
    "longest": lambda tokens: _MOST - tokens,
    "shortest": lambda tokens: tokens,
}


def startable(rules: Rules, ledger: Ledger, training: bool) -> Iterator[tuple[str, int]]:
    """(uid, number) of pending samples that can be trained before they get too stale. The ledger must not change while
    the iterator is read.

    Prompt by prompt, so that groups get complete: as they were loaded, or by the length that is expected of them
    (:data:`~verl_rhyme.scheduling.rules.StartOrder`). None of a load waits for ever, for nothing is loaded before it
    is all trained. Within a prompt those first that were longest when they were cut short. What spans versions must fit
    into the batches of all updates that may still train it: no more prompts are begun (AReaL's bound,
    arXiv:2505.24298), but for those that the next batch waits for. (After a loss more prompts may be here than are
    loaded otherwise, and those that the batch waits for may not have begun.)

    Args:
        training: A batch was harvested, and the policy that it makes is not there yet.
    """
    if training and rules.max_staleness == 0 and not rules.draft_ahead:
        return
    tally, room, seen = ledger.tally, float("inf"), set[int]()
    if rules.spans_versions and rules.max_staleness > 0:
        room = (rules.max_staleness + 1 - training) * rules.batch_samples - tally.begun

    def awaited(prompt: Prompt) -> bool:
        return rules.harvest == "loaded" and ledger.place(prompt) < rules.batch_prompts

    pending: Iterable[Prompt] = tally.prompts("pending")
    if room <= 0:  # while the trainer trains: the rest need not be ordered after every event
        pending = takewhile(awaited, pending)
    for prompt in _in_order(rules, ledger, pending):
        if room <= 0 and not awaited(prompt):
            break
        numbers = _longest_first(prompt)
        if not tally.has_begun(prompt):
            room -= len(numbers)
        for number in _after_probe(rules, prompt, numbers):
            yield prompt.uid, number
        seen.add(prompt.number)
    for prompt in _in_order(rules, ledger, (p for p in tally.prompts("begun") if p.number not in seen)):
        for number in _after_probe(rules, prompt, _longest_first(prompt)):
            yield prompt.uid, number


def priority(rules: Rules, prompt: Prompt) -> int:
    """Place of a prompt's samples in an engine's queue, lowest first, from 1: as :func:`startable` has it, but that a
    prompt which moved up to an earlier batch, in place of one that was dropped, keeps its place here."""
    if rules.start_order == "load":
        return prompt.number + 1
    before = prompt.number // rules.batch_prompts if rules.harvest == "loaded" else 0
    return 1 + before * (_MOST + 1) + int(_by_length(rules, prompt))


def _in_order(rules: Rules, ledger: Ledger, prompts: Iterable[Prompt]) -> Iterable[Prompt]:
    """Where a batch waits for the prompts that were loaded first, these go before all others."""
    if rules.start_order == "load":
        return prompts

    def place(prompt: Prompt) -> tuple[int, float, int]:
        batch = ledger.place(prompt) // rules.batch_prompts if rules.harvest == "loaded" else 0
        return batch, _by_length(rules, prompt), prompt.number

    return sorted(prompts, key=place)


def _by_length(rules: Rules, prompt: Prompt) -> float:
    return _PLACE[rules.start_order](_MOST if prompt.expected is None else min(prompt.expected, _MOST))


def _longest_first(prompt: Prompt) -> list[int]:
    pending = [number for number, sample in enumerate(prompt.samples) if sample.state == "pending"]
    return sorted(pending, key=lambda number: -prompt.samples[number].tokens)


def _after_probe(rules: Rules, prompt: Prompt, pending: list[int]) -> list[int]:
    """Those that need not wait for the first of their prompt to tell its length."""
    states = {sample.state for sample in prompt.samples} if rules.probe else set()
    if states and states <= {"pending", "running"}:
        return [] if "running" in states else pending[:1]
    return pending
