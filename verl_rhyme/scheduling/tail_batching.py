"""Tail batching (RollPacker, NSDI'26): prompts with long responses are put off and trained in rounds of their own.

On-policy, more prompts start than a batch trains. Those that a training step leaves out are put off. Once a full batch
of prompts is put off, it gets a separate round, in which no other prompt starts. So no prompt waits forever, and each
is trained once. Prompts with the longest expected responses are put off at loading, before any of their samples starts.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

from verl_rhyme.scheduling.ledger import Ledger
from verl_rhyme.scheduling.rules import Rules

#: Update batches of prompts among whose expected lengths the longest are selected.
_COMPARED = 4


class TailBatching:
    """Puts off prompts of a ledger, where the rules say so (``Rules.rounds``)."""

    def __init__(self, rules: Rules, ledger: Ledger) -> None:
        self._rules, self._ledger = rules, ledger
        self.own_round = False  # only prompts that were put off run
        self.expected: deque[float] = deque(maxlen=_COMPARED * rules.batch_prompts)  # of the latest prompts
        self._sorted: list[float] = []  # the same, sorted

    def restore(self, expected: Iterable[float], own_round: bool) -> None:
        """Restore the attributes, possibly of a run under other rules."""
        self.expected.extend(expected)
        self._sorted, self.own_round = sorted(self.expected), self._rules.rounds and own_round

    def needed(self, batches_left: int | None) -> float:
        """Return the prompts that all remaining training steps need in addition to those loaded."""
        rules = self._rules
        if batches_left is None or not rules.rounds:
            return math.inf
        return (batches_left * rules.batch_size - self._ledger.size) * rules.batch_prompts // rules.batch_size

    def expect(self, uid: str, tokens: float, batches_left: int | None) -> None:
        """Put off a prompt among the longest (``Rules.put_off``) if none of its samples has started. Call it before
        ``Prompt.expected`` changes: a new length of a prompt replaces the old one."""
        if not self._rules.put_off:
            return
        prompt, known = self._ledger.prompt(uid), self.expected
        outdated = prompt.expected
        if outdated not in known:
            outdated = known[0] if len(known) == known.maxlen else None
        if outdated is not None:
            known.remove(outdated)
            del self._sorted[bisect_left(self._sorted, outdated)]
        known.append(tokens)
        insort(self._sorted, tokens)
        batch, samples = self._rules.batch_size, prompt.samples
        left = 2 if batches_left is None else batches_left  # one training step is kept for this round
        put_off = self._ledger.size_put_off + (1 if self._rules.unit == "group" else len(samples))
        if self.own_round or put_off > batch * min(1, left - 1) or any(s.attempt >= 0 for s in samples):
            return
        if len(self._sorted) >= self._rules.batch_prompts:
            longest = self._sorted[int((1 - self._rules.put_off) * len(self._sorted))]
            if tokens >= longest > self._sorted[0]:
                self._ledger.set_put_off(uid)

    def choose_round(self, batches_left: int | None) -> None:
        """Put off the prompts that a batch left out, and choose what the next round runs.

        It runs prompts that were put off when they fill a batch, or when too few others are left.
        """
        if not self._rules.rounds:
            return
        ledger, batch = self._ledger, self._rules.batch_size
        for prompt in ledger:
            if not prompt.put_off:
                ledger.set_put_off(prompt.uid)
        before = ledger.size_put_off
        self.own_round = before >= batch
        for uid in list(ledger.put_off) if self.own_round else ():
            if before - ledger.size_put_off >= batch:
                break
            ledger.set_put_off(uid, put_off=False)
        self.release_for_the_last(batches_left)

    def release_for_the_last(self, batches_left: int | None) -> None:
        """Release prompts that were put off when later training steps could not train them."""
        left = math.inf if batches_left is None else max(0, batches_left - 1)
        most = left * self._rules.batch_size if self._rules.rounds else 0
        if self._ledger.size_put_off > most:
            for uid in list(self._ledger.put_off):
                self._ledger.set_put_off(uid, put_off=False)
