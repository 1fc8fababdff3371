"""What a ledger comes to: counts and sums over its prompts, which cost the same however many these are.

The scheduler asks after every event whether there is enough for a batch and what may start. A prompt that changed is
counted anew when somebody asks next; all others keep what they were counted with.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from verl_rhyme.scheduling.rules import Unit
from verl_rhyme.scheduling.samples import ON_THEIR_WAY, Prompt, State

#: What prompts can be asked for by: samples in a state, or (``begun``) pending ones beside others that have started.
Having = State | Literal["begun"]


@dataclass(slots=True)
class Part:
    """What one prompt adds.

    Attributes:
        samples: In each state.
        trainable: Samples, and their tokens, that can be trained of what is generated or finished.
        rewarded: The same, of what is finished.
        oldest: By state: version of the oldest token that has to wait for a sample in it.
    """

    samples: dict[State, int]
    trainable: tuple[int, int]
    rewarded: tuple[int, int]
    oldest: dict[State, int]

    @property
    def having(self) -> set[Having]:
        begun = "pending" in self.samples and any(state in self.samples for state in (*ON_THEIR_WAY, "finished"))
        return {*self.samples, "begun"} if begun else {*self.samples}


_NOTHING = Part({}, (0, 0), (0, 0), {})


def part(prompt: Prompt, unit: Unit) -> Part:
    """What a prompt adds."""
    samples: dict[State, int] = {}
    tokens: dict[State, int] = {}
    oldest: dict[State, int] = {}
    for sample in prompt.samples:
        state, version = sample.state, sample.oldest_version
        samples[state] = samples.get(state, 0) + 1
        tokens[state] = tokens.get(state, 0) + sample.tokens
        if version is not None:
            oldest[state] = min(oldest.get(state, version), version)
    rewarded = samples.get("finished", 0), tokens.get("finished", 0)
    trainable = rewarded[0] + samples.get("generated", 0), rewarded[1] + tokens.get("generated", 0)
    if unit == "group":
        if oldest:  # all wait for the oldest, as it waits for all
            oldest = dict.fromkeys(samples, min(oldest.values()))
        rewarded = rewarded if rewarded[0] == len(prompt.samples) else (0, 0)
        trainable = trainable if trainable[0] == len(prompt.samples) else (0, 0)
    return Part(samples, trainable, rewarded, oldest)


class Tally:
    """The sums of all prompts' :class:`Part`, and in which prompts to find what.

    Args:
        unit: What is trained together.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.samples: Counter[State] = Counter()
        self.trainable = (0, 0)
        self.rewarded = (0, 0)
        self._oldest: dict[State, Counter[int]] = {}  # prompts, by version
        self._numbers: dict[Having, list[int]] = {}  # of prompts, rising
        self._prompts: dict[int, Prompt] = {}
        self._parts: dict[int, Part] = {}
        self._changed: dict[int, Prompt] = {}

    def changed(self, prompt: Prompt) -> None:
        """A prompt came, or is not what it was."""
        self._changed[prompt.number] = prompt

    def left(self, prompt: Prompt) -> None:
        """A prompt is gone."""
        self._changed.pop(prompt.number, None)
        self._replace(prompt.number, _NOTHING)
        self._prompts.pop(prompt.number, None)

    def update(self) -> None:
        """Count what changed."""
        for number, prompt in self._changed.items():
            self._prompts[number] = prompt
            self._replace(number, part(prompt, self.unit))
        self._changed.clear()

    def prompts(self, having: Having, after: int = -1) -> Iterator[Prompt]:
        """In the order of loading, those past number ``after``. Nothing may change meanwhile."""
        numbers = self._numbers.get(having, [])
        for at in range(bisect_right(numbers, after), len(numbers)):
            yield self._prompts[numbers[at]]

    def oldest(self, state: State) -> int | None:
        """Version of the oldest token that has to wait for a sample in this state; ``None``: none has."""
        return min(self._oldest.get(state, ()), default=None)

    def _replace(self, number: int, new: Part) -> None:
        old = self._parts.pop(number, _NOTHING)
        if new is not _NOTHING:
            self._parts[number] = new
        for state, count in old.samples.items():
            self.samples[state] -= count
        for state, count in new.samples.items():
            self.samples[state] += count
        self.trainable = _exchanged(self.trainable, old.trainable, new.trainable)
        self.rewarded = _exchanged(self.rewarded, old.rewarded, new.rewarded)
        if old.oldest != new.oldest:
            for state, version in old.oldest.items():
                versions = self._oldest[state]
                versions[version] -= 1
                if not versions[version]:
                    del versions[version]
            for state, version in new.oldest.items():
                self._oldest.setdefault(state, Counter())[version] += 1
        if old.samples.keys() != new.samples.keys():
            before, after = old.having, new.having
            for having in before - after:
                numbers = self._numbers[having]
                del numbers[bisect_left(numbers, number)]
            for having in after - before:
                insort(self._numbers.setdefault(having, []), number)


def _exchanged(total: tuple[int, int], old: tuple[int, int], new: tuple[int, int]) -> tuple[int, int]:
    return total[0] - old[0] + new[0], total[1] - old[1] + new[1]
