"""The ledger of loaded prompts that are not trained yet: their samples and the state of each.

It holds no texts. A sample is pending, running, generated (its reward is unknown), finished or trained. Only
:meth:`Ledger.move` changes that state, and it rejects impossible changes: no sample is started twice or trained twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from verl_rhyme.scheduling.rules import Unit
from verl_rhyme.scheduling.samples import IN_PROGRESS, Prompt, Sample, State
from verl_rhyme.scheduling.tally import Tally

#: States from which a sample gets to a state.
_BEFORE: dict[State, tuple[State, ...]] = {
    "pending": ("pending", *IN_PROGRESS, "finished"),
    "running": ("pending",),
    "generated": ("running",),
    "finished": ("generated",),
    "trained": ("finished",),
}


class Ledger:
    """The ledger; iteration yields the prompts in loading order."""

    def __init__(self, unit: Unit = "group") -> None:
        self.unit = unit
        self._prompts: dict[str, Prompt] = {}
        self._numbers: list[int] = []  # numbers of the prompts, ascending
        self._tally = Tally(unit)
        #: Number of samples by prompt that was put off, in this order.
        self.put_off: dict[str, int] = {}
        #: Number of prompts loaded since the beginning.
        self.loaded = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._prompts.values())

    def __contains__(self, uid: str) -> bool:
        return uid in self._prompts

    @property
    def size(self) -> int:
        """Number of prompts, or of untrained samples where these are trained one by one."""
        return len(self) if self.unit == "group" else self.tally.untrained

    @property
    def size_put_off(self) -> int:
        return len(self.put_off) if self.unit == "group" else sum(self.put_off.values())

    def prompt(self, uid: str) -> Prompt:
        return self._prompts[uid]

    def place(self, prompt: Prompt) -> int:
        """Return the number of prompts in the ledger that were loaded before this one."""
        return bisect_left(self._numbers, prompt.number)

    @property
    def tally(self) -> Tally:
        self._tally.update()
        return self._tally

    def samples(self, state: State) -> Iterator[tuple[Prompt, int, Sample]]:
        """Yield the samples in a state, with prompt and number in the group, in loading order."""
        for prompt in list(self.tally.prompts(state)):
            for number, sample in enumerate(prompt.samples):
                if sample.state == state:
                    yield prompt, number, sample

    def load(self, uid: str, samples: int) -> None:
        if uid in self._prompts:
            raise ValueError(f"prompt {uid} is loaded already")
        self._prompts[uid] = Prompt(uid, self.loaded, [Sample() for _ in range(samples)])
        self._numbers.append(self.loaded)
        self._tally.changed(self._prompts[uid])
        self.loaded += 1

    def set_put_off(self, uid: str, put_off: bool = True) -> None:
        """Put off a prompt until a separate round, or (``put_off=False``) release it."""
        prompt = self._prompts[uid]
        prompt.put_off = put_off
        if put_off:
            self.put_off[uid] = sum(sample.state != "trained" for sample in prompt.samples)
        else:
            self.put_off.pop(uid, None)

    def move(self, uid: str, number: int, state: State, restored: bool = False) -> Sample:
        """Change the state of a sample and return it; its tokens and versions are set before :attr:`tally` is read.

        Raises ValueError if a sample in its state cannot get there; one that is ``restored`` is pending before.
        """
        if uid not in self._prompts:
            raise ValueError(f"sample {number} of prompt {uid} cannot become {state}: the prompt is not loaded")
        sample = self._prompts[uid].samples[number]
        if sample.state not in (("pending",) if restored else _BEFORE[state]):
            raise ValueError(f"sample {number} of prompt {uid} cannot become {state}: it is {sample.state}")
        sample.state = state
        sample.running_version = None
        self._tally.changed(self._prompts[uid])
        return sample

    def count_step(self) -> None:
        """Count a training step that left out all prompts of the ledger."""
        for prompt in self:
            prompt.waited += 1

    def train(self, uid: str, number: int) -> None:
        """Mark a finished response as trained; a prompt leaves with its last sample."""
        self.move(uid, number, "trained")
        if self._prompts[uid].complete("trained"):
            self.drop(uid)

    def drop(self, uid: str) -> None:
        prompt = self._prompts.pop(uid)
        self.put_off.pop(uid, None)
        del self._numbers[self.place(prompt)]
        self._tally.left(prompt)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; samples in progress are pending in them."""
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
        self._prompts, self._tally = {}, Tally(self.unit)
        self._numbers = [saved["number"] for saved in state["prompts"]]
        for saved in state["prompts"]:
            samples = [Sample(**sample) for sample in saved["samples"]]
            self._prompts[saved["uid"]] = Prompt(**{**saved, "samples": samples})
            self._tally.changed(self._prompts[saved["uid"]])
        self.put_off = {}
        for prompt in self:
            if prompt.put_off:
                self.set_put_off(prompt.uid)


def _saved(sample: Sample) -> dict[str, Any]:
    # Written out because dataclasses.asdict takes ten times as long, with every batch.
    return {
        "state": "pending" if sample.state in IN_PROGRESS else sample.state,
        "tokens": sample.tokens,
        "first_version": sample.first_version,
        "attempt": sample.attempt,
    }
