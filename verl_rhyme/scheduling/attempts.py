"""Attempts at a sample: their names, how one is to start, and what it reports when it ends.

These travel between the coordinator and the agent loop workers.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from verl_rhyme.placement.assignment import ANYWHERE, Assignment

#: How an attempt ends. ``generated``: the response came to its end, its reward is not known yet; ``finished``: it is,
#: and the trajectories are stored; ``interrupted``: cut short by a weight update; ``failed``: the agent loop or the
#: reward raised; ``lost``: it could not start.
Status = Literal["generated", "finished", "interrupted", "failed", "lost"]

#: Of verl's session number (an int, as verl wants it in a trajectory's key) the part that is the sample's number.
_SAMPLES = 1 << 16


class Attempt(NamedTuple):
    """One attempt at a sample: uid of its prompt, the sample's number in its group, and how many came before."""

    uid: str
    number: int
    attempt: int = 0

    @property
    def sample(self) -> tuple[str, int]:
        return self.uid, self.number

    @property
    def name(self) -> str:
        """Its name: what verl puts before the index of its trajectories.

        Each attempt has its own, so that what an abandoned one still writes is under a name that nobody reads.
        """
        return f"{self.uid}_{self.attempt * _SAMPLES + self.number}"

    @classmethod
    def named(cls, name: str) -> Attempt:
        """Inverse of :attr:`name`."""
        uid, _, number = name.rpartition("_")
        attempt, sample = divmod(int(number), _SAMPLES)
        return cls(uid, sample, attempt)


def sample_of(name: str) -> tuple[str, int]:
    """(uid, number in its group) of an :attr:`Attempt.name`."""
    return Attempt.named(name).sample


class Start(NamedTuple):
    """A sample to start.

    Attributes:
        name: Of the attempt (:attr:`Attempt.name`).
        predecessor: Name of the attempt that left turns: this one goes on from them or drafts from them; ``None``
            without any.
        partial: It goes on from these turns, rather than drafts from them (``Rules.continues``).
        stored: The predecessor finished: its turns are those of its trajectories.
        assignment: Where and how it is to run.
    """

    name: str
    predecessor: str | None = None
    partial: bool = False
    stored: bool = False
    assignment: Assignment = ANYWHERE


class Ended(NamedTuple):
    """How an attempt ended, as it reports.

    Attributes:
        name: Of the attempt (:attr:`Attempt.name`).
        status: See :data:`Status`.
        tokens: Response tokens it has, with those it went on from.
        first_version: Policy version of the oldest of them; ``None`` without any.
        records: What the servers said of its requests, one mapping each (``processes.request.RequestRecord``).
        scores: ``finished``: for each of its trajectories what groups are filtered by; empty where none are.
        error: ``failed``, ``lost``: why.
        empty: ``finished``: the agent loop gave no trajectory; its group does without.
    """

    name: str
    status: Status
    tokens: int = 0
    first_version: int | None = None
    records: list[dict[str, Any]] = []  # noqa: RUF012  nobody changes it
    scores: list[float] = []  # noqa: RUF012
    error: str = ""
    empty: bool = False
