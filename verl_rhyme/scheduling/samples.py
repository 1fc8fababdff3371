"""Prompts and samples of the ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: State of a sample. ``generated``: its reward is unknown.
State = Literal["pending", "running", "generated", "finished", "trained"]

#: States of samples whose attempt is in progress.
IN_PROGRESS: tuple[State, ...] = ("running", "generated")


@dataclass(slots=True)
class Sample:
    """One response of a prompt."""

    state: State = "pending"
    tokens: int = 0  # of the response; before it is finished, those kept or regenerated
    first_version: int | None = None  # of the oldest kept token
    attempt: int = -1  # latest one, from 0; reports of earlier ones are ignored
    running_version: int | None = None  # lowest possible one of its oldest token while it runs over version changes

    @property
    def oldest_version(self) -> int | None:
        """Policy version of the oldest token, running ones included; ``None`` where unknown."""
        return self.first_version if self.running_version is None else self.running_version

    @property
    def known_version(self) -> int:
        version = self.oldest_version
        assert version is not None, "a generated sample has tokens, and they a version"
        return version

    def run_from(self, version: int) -> None:
        """Set the lowest possible version of the new tokens, where the sample runs over version changes."""
        self.running_version = version if self.first_version is None else min(self.first_version, version)

    @property
    def kept_tokens(self) -> int:
        """Tokens that may still be trained; other tokens are at most a draft and counted as wasted."""
        return 0 if self.first_version is None else self.tokens


@dataclass(slots=True)
class Prompt:
    """One loading of a prompt."""

    uid: str  # new at every loading
    number: int  # prompts loaded before it
    samples: list[Sample] = field(default_factory=list)
    waited: int = 0  # training steps since it was loaded
    expected: float | None = None  # response tokens; None where unknown
    put_off: bool = False  # waits for a separate round (Rules.rounds)

    def complete(self, *states: State) -> bool:
        return all(sample.state in states for sample in self.samples)

    @property
    def untrained_tokens(self) -> int:
        return sum(sample.kept_tokens for sample in self.samples if sample.state != "trained")
