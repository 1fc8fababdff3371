"""Prompts and their samples, as the ledger holds them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: How far a sample has come. ``generated``: its reward is not known yet.
State = Literal["pending", "running", "generated", "finished", "trained"]

#: Samples in these states belong to an attempt that somebody works on.
ON_THEIR_WAY: tuple[State, ...] = ("running", "generated")


@dataclass(slots=True)
class Sample:
    """One response of a prompt.

    Attributes:
        state: See the module.
        tokens: Response tokens it has: kept, or to be regenerated, while it is not finished.
        first_version: Policy version of its oldest kept token; ``None`` without any.
        running_version: While it runs on over version changes, what its oldest token may be of; else ``None``.
        attempt: Number of its latest start, from 0; what an earlier attempt may still say is nobody's.
    """

    state: State = "pending"
    tokens: int = 0
    first_version: int | None = None
    attempt: int = -1
    running_version: int | None = None

    @property
    def oldest_version(self) -> int | None:
        """Policy version of its oldest token, the ones in the making included; ``None`` where nobody knows of any."""
        return self.first_version if self.running_version is None else self.running_version

    @property
    def kept_tokens(self) -> int:
        """Those of its tokens that may yet be trained; the others are at most a draft, and were counted as wasted."""
        return 0 if self.first_version is None else self.tokens


@dataclass(slots=True)
class Prompt:
    """One loading of a prompt.

    Attributes:
        uid: Its name, new at every loading.
        number: How many were loaded before it.
        samples: Its group.
        waited: Updates that passed since it was loaded.
        expected: Tokens that a response of it is expected to have; ``None`` where nobody said.
        put_off: It waits for a round of its own (``Rules.rounds``).
    """

    uid: str
    number: int
    samples: list[Sample] = field(default_factory=list)
    waited: int = 0
    expected: float | None = None
    put_off: bool = False

    def complete(self, *states: State) -> bool:
        """Every sample is in one of the states."""
        return all(sample.state in states for sample in self.samples)

    @property
    def untrained_tokens(self) -> int:
        """Those that may yet be trained."""
        return sum(sample.kept_tokens for sample in self.samples if sample.state != "trained")
