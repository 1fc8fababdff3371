"""Attempts at a sample: names, starts, and reports of their ends.

The coordinator and the agent loop workers exchange these.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from verl_rhyme.placement.assignment import ANYWHERE, Assignment

#: A server's record of a request (``processes.request.RequestRecord``), with the ``uid`` of its prompt.
Record = dict[str, Any]

#: End of an attempt. ``generated``: the response is complete, its reward is unknown; ``finished``: the reward is known,
#: the trajectories are stored; ``interrupted``: by a weight update; ``failed``: the agent loop or the reward function
#: raised; ``lost``: it could not start.
Status = Literal["generated", "finished", "interrupted", "failed", "lost"]

#: verl's stop reasons of a request that was aborted.
ABORTED = ("abort", "aborted")

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
    def session_id(self) -> int:
        """verl's number of the session; unique, so that late writes of an abandoned attempt are never read."""
        return self.attempt * _SAMPLES + self.number

    @property
    def name(self) -> str:
        """verl's key of the attempt's trajectories, without their index."""
        return f"{self.uid}_{self.session_id}"

    @classmethod
    def named(cls, name: str) -> Attempt:
        """Inverse of :attr:`name`. Raises ValueError for other keys."""
        uid, _, number = name.rpartition("_")
        attempt, sample = divmod(int(number), _SAMPLES)
        return cls(uid, sample, attempt)


def sample_of(name: str) -> tuple[str, int]:
    return Attempt.named(name).sample


class Start(NamedTuple):
    """A sample to start."""

    attempt: Attempt
    predecessor: Attempt | None = None  # whose turns this one continues or drafts from
    partial: bool = False  # continues from these turns, rather than drafts from them
    stored: bool = False  # the predecessor finished: its turns are in its trajectories
    assignment: Assignment = ANYWHERE
    spans: bool = False  # its tokens may be of several policy versions (Rules.continues)


class AttemptReport(NamedTuple):
    """Report of an attempt's end: from its worker, in the rollout until its sample is trained, and in TransferQueue."""

    attempt: Attempt
    status: Status
    tokens: int = 0  # of the response, including those it continued from
    first_version: int | None = None  # policy version of the oldest of them; None without tokens
    #: Records of its requests by the servers (``processes.request.RequestRecord``), and of those it continued from.
    records: list[Record] = []  # noqa: RUF012  never changed
    #: ``finished``: scores of its trajectories by which groups are filtered; empty without a filter.
    scores: list[float] = []  # noqa: RUF012
    error: str = ""  # failed, lost: the reason
    empty: bool = False  # finished: the agent loop returned no trajectory; the group is trained without it
    broken: bool = False  # failed: the error is one of wrong code
    tries: int = 1  # failed: number of failures that it counts as

    @property
    def leaves_turns(self) -> bool:
        """Whether its worker keeps turns of it, for the next attempt."""
        return self.status == "interrupted" or (self.status == "failed" and self.tokens > 0)

    @property
    def stored(self) -> bool:
        """Whether its turns are in its trajectories."""
        return self.status == "finished" and not self.empty

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for TransferQueue, without the attempt: ``AttemptReport(attempt, **values)``."""
        values = self._asdict()
        del values["attempt"]
        return values
