"""What was loaded and is not yet trained: prompts, their samples, and how far each has come.

The texts themselves lie with whoever made them; this is the ledger. A sample is pending, running, generated (its reward
is not known yet), finished or trained, and goes from one to the next by the methods of :class:`Ledger` alone,
which refuse what cannot be: no sample is lost, started twice or trained twice. Beside it, what a step comes to: its
:class:`Collected` and its :class:`StepCounts`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_rhyme.scheduling.rules import Unit
from verl_rhyme.scheduling.samples import ON_THEIR_WAY, Prompt, Sample, State
from verl_rhyme.scheduling.tally import Tally


@dataclass(frozen=True)
class Collected:
    """One update batch.

    Attributes:
        samples: (uid, number in its group), shortest first.
        lengths: Tokens of each.
        waited: Updates that passed each one's prompt by.
        staleness: Of each one's oldest token: policy versions between it and the policy that is trained; 0 is
            on-policy.
        unit: What is trained together.
    """

    samples: list[tuple[str, int]]
    lengths: list[int]
    waited: list[int]
    staleness: list[int]
    unit: Unit = "group"

    @property
    def group_staleness(self) -> list[int]:
        """Of each group's oldest token, in policy versions; where ``unit`` is a trajectory, each is its own group."""
        if self.unit == "trajectory":
            return self.staleness
        oldest: dict[str, int] = {}
        for (uid, _), staleness in zip(self.samples, self.staleness, strict=True):
            oldest[uid] = max(staleness, oldest.get(uid, 0))
        return list(oldest.values())


@dataclass
class StepCounts:
    """What became of tokens since the scheduler's last ``begin``.

    Attributes:
        loaded, dropped: Prompts.
        interrupted: Running samples that were cut short.
        stale: Samples, finished or (where they span versions) still running, that got too stale and are generated anew.
        abandoned: Attempts that were lost, or not waited for.
        wasted_tokens: Tokens that were made and will not be trained.
    """

    loaded: int = 0
    dropped: int = 0
    interrupted: int = 0
    stale: int = 0
    abandoned: int = 0
    wasted_tokens: int = 0

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


class Ledger:
    """The ledger; iterating gives the prompts in the order of loading.

    Prompts and samples are read by all, and changed here alone: :attr:`tally` counts anew what was changed.

    Args:
        unit: What is trained together.
    """

    def __init__(self, unit: Unit = "group") -> None:
        self._prompts: dict[str, Prompt] = {}
        self._numbers: list[int] = []  # of these, rising
        self._tally = Tally(unit)
        #: Prompts that were put off, in this order, and their samples.
        self.put_off: dict[str, int] = {}
        #: Prompts loaded since the beginning.
        self.loaded = 0
        #: The least number of an attempt that is started: above those that were started before and may yet tell.
        self.first_attempt = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts.values())

    def __contains__(self, uid: str) -> bool:
        return uid in self._prompts

    def prompt(self, uid: str) -> Prompt:
        """Raises ``KeyError`` for one that is not here (any more)."""
        return self._prompts[uid]

    def place(self, prompt: Prompt) -> int:
        """How many that are here were loaded before this one."""
        return bisect_left(self._numbers, prompt.number)

    @property
    def tally(self) -> Tally:
        """What the ledger comes to, as it is now."""
        self._tally.update()
        return self._tally

    def samples(self, state: State) -> Iterator[tuple[Prompt, int, Sample]]:
        """Samples in a state, with prompt and number in the group, in the order of loading."""
        for prompt in list(self.tally.prompts(state)):
            for number, sample in enumerate(prompt.samples):
                if sample.state == state:
                    yield prompt, number, sample

    def load(self, uid: str, samples: int) -> None:
        """Take in a prompt of which ``samples`` responses are wanted."""
        if uid in self._prompts:
            raise ValueError(f"prompt {uid} is loaded already")
        if samples < 1:
            raise ValueError(f"prompt {uid} is loaded with {samples} samples; at least 1 is needed")
        self._prompts[uid] = Prompt(uid, self.loaded, [Sample() for _ in range(samples)])
        self._numbers.append(self.loaded)
        self._tally.changed(self._prompts[uid])
        self.loaded += 1

    def expect(self, uid: str, tokens: float) -> None:
        """A response of this prompt is expected to have so many tokens; one that is not here is passed over."""
        if uid in self._prompts:
            self._prompts[uid].expected = tokens

    def postpone(self, uid: str, put_off: bool = True) -> None:
        """A prompt waits for a round of its own, or (``put_off=False``) waits no longer."""
        prompt = self._prompts[uid]
        prompt.put_off = put_off
        if put_off:
            self.put_off[uid] = sum(sample.state != "trained" for sample in prompt.samples)
        else:
            self.put_off.pop(uid, None)

    def start(self, uid: str, number: int, version: int | None = None) -> None:
        """``version``: what its new tokens are at least of, where it may run on over version changes."""
        sample = self._move(uid, number, ("pending",), "running")
        sample.attempt = max(sample.attempt + 1, self.first_attempt)
        if version is not None:
            self.progress(uid, number, version)

    def progress(self, uid: str, number: int, version: int) -> None:
        """The oldest token of a running attempt is of ``version``, or of what it goes on from."""
        sample = self._move(uid, number, ("running",), "running")
        before = version if sample.first_version is None else sample.first_version
        sample.running_version = min(before, version)

    def generate(self, uid: str, number: int, tokens: int, first_version: int) -> None:
        """A response came to its end: it has ``tokens``, the oldest of them from ``first_version``."""
        sample = self._move(uid, number, ("running",), "generated")
        sample.tokens, sample.first_version = tokens, first_version

    def finish(self, uid: str, number: int) -> None:
        """A generated response has its reward."""
        self._move(uid, number, ("generated",), "finished")

    def interrupt(self, uid: str, number: int, tokens: int, first_version: int | None) -> None:
        """A running response was cut short after ``tokens``; what is kept of it, the caller decides."""
        sample = self._move(uid, number, ("running",), "pending")
        sample.tokens, sample.first_version = tokens, first_version

    def abandon(self, uid: str, number: int) -> None:
        """Nobody waits for this attempt any longer: the next goes on from what was told before it."""
        self._move(uid, number, ("running", "generated"), "pending")

    def regenerate(self, uid: str, number: int) -> None:
        """What a response says may not be trained any more: it is to be generated anew."""
        sample = self._move(uid, number, ("running", "generated", "finished"), "pending")
        sample.first_version = None

    def restore(
        self, uid: str, number: int, attempt: int, state: State, tokens: int, first_version: int | None
    ) -> None:
        """Put a sample where it was after this ledger was saved.

        Raises:
            ValueError: The ledger knows of a later attempt, or that this one was further; or no sample is like this.
        """
        known = self._prompts[uid].samples[number] if uid in self._prompts else Sample()
        if attempt < known.attempt or (
            attempt == known.attempt and known.state == "finished" and state in ON_THEIR_WAY
        ):
            raise ValueError(
                f"sample {number} of prompt {uid} cannot be restored as {state} in attempt {attempt}: it is "
                f"{known.state} in attempt {known.attempt}, and what is older tells nothing; restore its latest attempt"
            )
        if state == "trained" or (state != "pending" and attempt < 0):
            raise ValueError(
                f"sample {number} of prompt {uid} cannot be restored as {state} in attempt {attempt}: it is pending, "
                "or running, generated or finished in an attempt from 0"
            )
        sample = self._move(uid, number, ("pending", *ON_THEIR_WAY, "finished"), state)
        sample.attempt, sample.tokens, sample.first_version = attempt, tokens, first_version

    def forget(self, uid: str, number: int) -> None:
        """What was kept of a response is not gone on from."""
        self._prompts[uid].samples[number].first_version = None
        self._tally.changed(self._prompts[uid])

    def wait(self) -> None:
        """An update passed by all that is here."""
        for prompt in self:
            prompt.waited += 1

    def train(self, uid: str, number: int) -> None:
        """A finished response goes to the trainer; with its last one a prompt leaves."""
        self._move(uid, number, ("finished",), "trained")
        if self._prompts[uid].complete("trained"):
            self.drop(uid)

    def drop(self, uid: str) -> None:
        """A prompt leaves: it is trained, it failed, or was filtered."""
        prompt = self._prompts.pop(uid)
        self.put_off.pop(uid, None)
        del self._numbers[self.place(prompt)]
        self._tally.left(prompt)

    def state_dict(self) -> dict[str, Any]:
        """Plain, for JSON. What was on its way when it was taken is pending in it."""
        prompts = [
            {
                "uid": prompt.uid,
                "number": prompt.number,
                "samples": [_saved(sample) for sample in prompt.samples],
                "waited": prompt.waited,
                "expected": prompt.expected,
                "put_off": prompt.put_off,
            }
            for prompt in self
        ]
        return {"loaded": self.loaded, "prompts": prompts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["loaded"]
        self._prompts, self._tally = {}, Tally(self._tally.unit)
        self._numbers = [saved["number"] for saved in state["prompts"]]
        for saved in state["prompts"]:
            samples = [Sample(**sample) for sample in saved["samples"]]
            self._prompts[saved["uid"]] = Prompt(**{**saved, "samples": samples})
            self._tally.changed(self._prompts[saved["uid"]])
        self.put_off = {}
        for prompt in self:
            if prompt.put_off:
                self.postpone(prompt.uid)

    def _move(self, uid: str, number: int, sources: tuple[State, ...], target: State) -> Sample:
        if uid not in self._prompts:
            raise ValueError(f"sample {number} of prompt {uid} cannot become {target}: the prompt is not loaded")
        sample = self._prompts[uid].samples[number]
        if sample.state not in sources:
            raise ValueError(f"sample {number} of prompt {uid} cannot become {target}: it is {sample.state}")
        sample.state = target
        sample.running_version = None
        self._tally.changed(self._prompts[uid])
        return sample


def _saved(sample: Sample) -> dict[str, Any]:
    # By hand: dataclasses.asdict takes ten times as long, with every batch.
    return {
        "state": "pending" if sample.state in ON_THEIR_WAY else sample.state,
        "tokens": sample.tokens,
        "first_version": sample.first_version,
        "attempt": sample.attempt,
    }
