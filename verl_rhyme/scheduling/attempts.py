"""Attempts at a sample: names, starts, and reports of their ends.

The coordinator and the agent loop workers exchange these.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from verl_rhyme.placement.assignment import ANYWHERE, Assignment
from verl_rhyme.scheduling.batch import Record

#: End of an attempt. ``generated``: the response is complete, its reward is unknown; ``finished``: the reward is known,
#: the trajectories are stored; ``interrupted``: by a weight update; ``failed``: the agent loop or the reward function
#: raised; ``lost``: it could not start.
Status = Literal["generated", "finished", "interrupted", "failed", "lost"]

#: Multiplier of the attempt in verl's session number (an int in a trajectory's key); the rest is the sample's number.
_SAMPLES = 1 << 16


class Attempt(NamedTuple):
    """One attempt at a sample: uid of the prompt, sample's number in the group, number of earlier attempts."""

    uid: str
    number: int
    attempt: int = 0

    @property
    def sample(self) -> tuple[str, int]:
        return self.uid, self.number

    @property
    def name(self) -> str:
        """Name of the attempt: verl's key of its trajectories, without their index.

        Each attempt has a unique name, so that late writes of an abandoned attempt are never read.
        """
        return f"{self.uid}_{self.attempt * _SAMPLES + self.number}"

    @classmethod
    def named(cls, name: str) -> Attempt:
        """Return the attempt with this name; inverse of :attr:`name`."""
        uid, _, number = name.rpartition("_")
        attempt, sample = divmod(int(number), _SAMPLES)
        return cls(uid, sample, attempt)


def sample_of(name: str) -> tuple[str, int]:
    """Return the sample of an :attr:`Attempt.name`."""
    return Attempt.named(name).sample


class Start(NamedTuple):
    """A sample to start.

    Attributes:
        name: :attr:`Attempt.name`.
        predecessor: Name of the attempt whose turns this one continues or drafts from; ``None`` without one.
        partial: Whether it continues from these turns rather than drafts from them.
        stored: Whether the predecessor finished: its turns are in its trajectories.
        assignment: Replica and queue place.
        spans: Whether its tokens may be of several policy versions (``Rules.continues``).
    """

    name: str
    predecessor: str | None = None
    partial: bool = False
    stored: bool = False
    assignment: Assignment = ANYWHERE
    spans: bool = False


class Ended(NamedTuple):
    """Report of an attempt's end.

    Attributes:
        name: :attr:`Attempt.name`.
        tokens: Response tokens, including those it continued from.
        first_version: Policy version of the oldest of them; ``None`` without tokens.
        records: Servers' records of its requests, one mapping each (``processes.request.RequestRecord``).
        scores: ``finished``: scores of its trajectories by which groups are filtered; empty without a filter.
        error: ``failed``, ``lost``: the reason.
        broken: ``failed``: whether the error is one of wrong code.
        tries: ``failed``: number of failures that it counts as.
        empty: ``finished``: whether the agent loop returned no trajectory; the group is trained without it.
    """

    name: str
    status: Status
    tokens: int = 0
    first_version: int | None = None
    records: list[Record] = []  # noqa: RUF012  never changed
    scores: list[float] = []  # noqa: RUF012
    error: str = ""
    empty: bool = False
    broken: bool = False
    tries: int = 1


@dataclass
class Reported:
    """What is kept of the reports of an untrained sample.

    Attributes:
        attempt: Latest ended attempt that left turns, to continue from or to draft from; ``None`` without one.
        records: Records of its requests, and of those of the attempts it continued from, with ``uid`` and ``sample``.
        stored: Whether its turns are in its trajectories.
        scores: Scores of its trajectories by which groups are filtered.
        empty: Whether it finished without a trajectory.
    """

    attempt: int | None = None
    records: list[Record] = field(default_factory=list)
    stored: bool = False
    scores: list[float] = field(default_factory=list)
    empty: bool = False

    @classmethod
    def of(cls, attempt: Attempt, records: Iterable[Record]) -> Reported:
        """Return the report of an attempt that left its turns."""
        return cls(attempt.attempt, [{**record, "uid": attempt.uid, "sample": attempt.number} for record in records])
