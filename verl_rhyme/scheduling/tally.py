"""Counts and sums over a ledger's prompts, at a cost that does not depend on the number of prompts.

After every event the scheduler checks whether a batch is complete and which samples may start. A changed prompt is
recounted at the next read; the counts of all others stay.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from verl_rhyme.scheduling.rules import Unit
from verl_rhyme.scheduling.samples import IN_PROGRESS, Prompt, Sample, State

#: Lookup keys for prompts: samples in a state, or (``begun``) pending samples of a prompt that has started.
Having = State | Literal["begun"]


@dataclass(slots=True)
class Part:
    """Counts of one prompt's samples; of single trajectories by each one's oldest token, of groups all by the group's.

    Example: of 3 samples, 2 are finished, with tokens from versions 5 and 6, and one runs since version 6. As single
    trajectories 2 can be trained: ``trainable`` and ``rewarded`` are {5: 1, 6: 1}, ``held`` is {5: 1, 6: 2}. As a group
    none can be trained before all are finished: ``trainable`` and ``rewarded`` are {}, ``held`` is {5: 3}. ``begun`` is
    3 in both.
    """

    samples: dict[State, int]
    trainable: dict[int, int]  # generated or finished, and can be trained; by version of the oldest token
    rewarded: dict[int, int]  # the same for finished ones
    held: dict[int, int]  # the same for all untrained ones that have tokens, or are in a group with tokens
    begun: int  # untrained ones, if any of them has started

    @property
    def finished(self) -> int:
        return self.samples.get("finished", 0)

    @property
    def having(self) -> set[Having]:
        return {*self.samples, "begun"} if self.begun and "pending" in self.samples else {*self.samples}


_NOTHING = Part({}, {}, {}, {}, 0)


def part(prompt: Prompt, unit: Unit) -> Part:
    group = prompt.samples
    samples: dict[State, int] = {}
    held: dict[int, int] = {}
    for sample in group:  # runs after every event: keep it minimal
        state = sample.state
        samples[state] = samples.get(state, 0) + 1
        version = sample.first_version if sample.running_version is None else sample.running_version
        if version is not None and state != "trained":
            held[version] = held.get(version, 0) + 1
    untrained = len(group) - samples.get("trained", 0)
    begun = untrained if held or not samples.keys().isdisjoint(IN_PROGRESS) else 0
    ended = samples.get("finished", 0) + samples.get("generated", 0)
    if unit == "group":
        held = {min(held): untrained} if held else {}
        trainable = held if ended == len(group) else {}
        rewarded = held if samples.get("finished") == len(group) else {}
        return Part(samples, trainable, rewarded, held, begun)
    if not ended:
        return Part(samples, {}, {}, held, begun)
    return Part(samples, _versions(group, "generated", "finished"), _versions(group, "finished"), held, begun)


def _versions(group: list[Sample], *states: State) -> dict[int, int]:
    """Return the number of samples in these states, by version of the oldest token."""
    return Counter(sample.known_version for sample in group if sample.state in states)


class Tally:
    """Sums of all prompts' :class:`Part`, and an index of the prompts."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.samples: Counter[State] = Counter()
        self.trainable: Counter[int] = Counter()
        self.rewarded: Counter[int] = Counter()
        self.held: Counter[int] = Counter()
        self.begun = 0
        self._numbers: dict[Having, list[int]] = {}  # prompt numbers, ascending
        self._prompts: dict[int, Prompt] = {}
        self._parts: dict[int, Part] = {}
        self._changed: dict[int, Prompt] = {}

    def changed(self, prompt: Prompt) -> None:
        self._changed[prompt.number] = prompt

    def left(self, prompt: Prompt) -> None:
        self._changed.pop(prompt.number, None)
        self._replace(prompt.number, _NOTHING)
        self._prompts.pop(prompt.number, None)

    def update(self) -> None:
        for number, prompt in self._changed.items():
            self._prompts[number] = prompt
            self._replace(number, part(prompt, self.unit))
        self._changed.clear()

    def prompts(self, having: Having) -> Iterator[Prompt]:
        """Yield prompts in loading order; the ledger must not change meanwhile."""
        for number in self._numbers.get(having, ()):
            yield self._prompts[number]

    @property
    def untrained(self) -> int:
        return sum(self.samples.values()) - self.samples["trained"]

    def part(self, prompt: Prompt) -> Part:
        return self._parts[prompt.number]

    def _replace(self, number: int, new: Part) -> None:
        old = self._parts.pop(number, _NOTHING)
        if new is not _NOTHING:
            self._parts[number] = new
        for state, count in old.samples.items():
            self.samples[state] -= count
        for state, count in new.samples.items():
            self.samples[state] += count
        self.begun += new.begun - old.begun
        _exchange(self.trainable, old.trainable, new.trainable)
        _exchange(self.rewarded, old.rewarded, new.rewarded)
        _exchange(self.held, old.held, new.held)
        if old.samples.keys() == new.samples.keys() and (old.begun > 0) == (new.begun > 0):  # as after most events
            return
        before, after = old.having, new.having
        for having in before - after:
            numbers = self._numbers[having]
            del numbers[bisect_left(numbers, number)]
        for having in after - before:
            insort(self._numbers.setdefault(having, []), number)


def _exchange(total: Counter[int], old: dict[int, int], new: dict[int, int]) -> None:
    if old == new:
        return
    for version, samples in old.items():
        total[version] -= samples
        if not total[version]:
            del total[version]
    for version, samples in new.items():
        total[version] += samples
