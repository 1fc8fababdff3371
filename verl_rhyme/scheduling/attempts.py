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
        """verl's key of the attempt's trajectories, without their index. It is unique: late writes of an abandoned
        attempt are never read.
        """
        return f"{self.uid}_{self.attempt * _SAMPLES + self.number}"

    @classmethod
    def named(cls, name: str) -> Attempt:
        """Inverse of :attr:`name`."""
        uid, _, number = name.rpartition("_")
        attempt, sample = divmod(int(number), _SAMPLES)
        return cls(uid, sample, attempt)


def sample_of(name: str) -> tuple[str, int]:
    return Attempt.named(name).sample


class Start(NamedTuple):
    """A sample to start."""

    name: str  # Attempt.name
    predecessor: str | None = None  # attempt whose turns this one continues or drafts from
    partial: bool = False  # continues from these turns, rather than drafts from them
    stored: bool = False  # the predecessor finished: its turns are in its trajectories
    assignment: Assignment = ANYWHERE
    spans: bool = False  # its tokens may be of several policy versions (Rules.continues)


class Ended(NamedTuple):
    """Report of an attempt's end."""

    name: str  # Attempt.name
    status: Status
    tokens: int = 0  # of the response, including those it continued from
    first_version: int | None = None  # policy version of the oldest of them; None without tokens
    #: Records of its requests by the servers (``processes.request.RequestRecord``).
    records: list[Record] = []  # noqa: RUF012  never changed
    #: ``finished``: scores of its trajectories by which groups are filtered; empty without a filter.
    scores: list[float] = []  # noqa: RUF012
    error: str = ""  # failed, lost: the reason
    empty: bool = False  # finished: the agent loop returned no trajectory; the group is trained without it
    broken: bool = False  # failed: the error is one of wrong code
    tries: int = 1  # failed: number of failures that it counts as


@dataclass
class Reported:
    """What is kept of the reports of an untrained sample."""

    attempt: int | None = None  # latest ended one that left turns, to continue or to draft from
    #: With ``uid`` and ``sample``; also those of the attempts it continued from.
    records: list[Record] = field(default_factory=list)
    stored: bool = False  # its turns are in its trajectories
    scores: list[float] = field(default_factory=list)  # of its trajectories, by which groups are filtered
    empty: bool = False  # finished without a trajectory

    @classmethod
    def of(cls, attempt: Attempt, records: Iterable[Record]) -> Reported:
        return cls(attempt.attempt, [{**record, "uid": attempt.uid, "sample": attempt.number} for record in records])
