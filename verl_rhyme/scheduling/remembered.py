"""Reports of attempts that are kept, and the batch with its statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.ledger import Collected, StepCounts

#: A sample: uid of its prompt, number in the group.
Name = tuple[str, int]
#: A server's record of a request (``processes.request.RequestRecord``).
Record = dict[str, Any]


@dataclass
class Batch:
    """An update batch, and the statistics since the last one.

    Attributes:
        collected: The samples.
        attempts: Name of each sample's attempt, the prefix of its trajectories' keys; samples without trajectories are
            omitted.
        version: Policy version that it trains.
        trained: Request records of these samples, with ``uid`` and ``sample``.
        ran: Records of attempts that ended since the last batch.
        wasted: Records of attempts whose tokens will not be trained.
        counts: The scheduler's counts.
        left: Finished samples outside the batch.
        failed: Prompts dropped since the last batch because a sample failed.
        filtered: Groups dropped since the last batch, by their common score.
    """

    collected: Collected
    attempts: list[str]
    version: int
    trained: list[Record]
    ran: list[Record]
    wasted: list[Record]
    counts: StepCounts
    left: int
    failed: int
    filtered: dict[float, int]


@dataclass
class Remembered:
    """Reports of attempts at untrained samples, by sample."""

    attempt: dict[Name, int] = field(default_factory=dict)  # latest ended attempt that left turns
    stored: set[Name] = field(default_factory=set)  # samples whose turns are in their trajectories
    records: dict[Name, list[Record]] = field(default_factory=dict)  # including attempts it continued from
    scores: dict[Name, list[float]] = field(default_factory=dict)
    empty: set[Name] = field(default_factory=set)  # finished without a trajectory

    def ended(self, attempt: Attempt, records: Iterable[Record]) -> list[Record]:
        """Record that an attempt left its turns; return its request records with ``uid`` and ``sample``."""
        uid, number, self.attempt[attempt.sample] = attempt
        self.stored.discard(attempt.sample)
        self.records[attempt.sample] = named = [{**record, "uid": uid, "sample": number} for record in records]
        return named

    def forget(self, sample: Name) -> list[Record]:
        """Forget a sample and return its records."""
        self.attempt.pop(sample, None)
        self.stored.discard(sample)
        self.scores.pop(sample, None)
        self.empty.discard(sample)
        return self.records.pop(sample, [])


class Hopeless(RuntimeError):
    """Training cannot continue: too many consecutive prompts failed or were filtered."""
