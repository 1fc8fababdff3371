"""What is remembered of attempts, and what a batch is reported with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.ledger import Collected, StepCounts

#: A sample: uid of its prompt, number in the group.
Name = tuple[str, int]
#: What a server said of a request (``processes.request.RequestRecord``).
Record = dict[str, Any]


@dataclass
class Batch:
    """An update batch, and what came to pass since the last one.

    Attributes:
        harvest: The samples.
        attempts: Name of each one's attempt: its trajectories' keys begin with it. Those without any are left out.
        version: The policy version it trains.
        trained: Request records of these samples, with ``uid`` and ``sample``.
        ran: Those of the attempts that ended since the last batch.
        wasted: Those of attempts whose tokens will not be trained.
        counts: The scheduler's.
        left: Finished samples that are not in it.
        failed: Prompts that were dropped since the last batch because a sample failed.
        filtered: By their common score, how many groups were dropped since the last batch.
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
    """By sample, what attempts reported; of samples that are not trained yet."""

    attempt: dict[Name, int] = field(default_factory=dict)  # which one ended last and has left its turns
    stored: set[Name] = field(default_factory=set)  # of these, whose turns are in its trajectories
    records: dict[Name, list[Record]] = field(default_factory=dict)  # of that attempt, and of what it went on from
    scores: dict[Name, list[float]] = field(default_factory=dict)
    empty: set[Name] = field(default_factory=set)  # finished without a trajectory

    def ended(self, attempt: Attempt, records: Iterable[Record]) -> list[Record]:
        """It has left its turns, and these records of its requests: the same, with ``uid`` and ``sample``."""
        uid, number, self.attempt[attempt.sample] = attempt
        self.stored.discard(attempt.sample)
        self.records[attempt.sample] = named = [{**record, "uid": uid, "sample": number} for record in records]
        return named

    def forget(self, sample: Name) -> list[Record]:
        """Its records."""
        self.attempt.pop(sample, None)
        self.stored.discard(sample)
        self.scores.pop(sample, None)
        self.empty.discard(sample)
        return self.records.pop(sample, [])


class Hopeless(RuntimeError):
    """Prompt after prompt fails or is filtered, and none is left to train."""
