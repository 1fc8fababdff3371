"""An update batch, and the counts of what happened since the last one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_rhyme.scheduling.rules import Unit

#: A server's record of a request (``processes.request.RequestRecord``).
Record = dict[str, Any]


@dataclass(frozen=True)
class Collected:
    """The samples of an update batch.

    Attributes:
        samples: (uid, number in the group), shortest first.
        lengths: Tokens of each sample.
        waited: Training steps that left out each sample's prompt.
        staleness: Versions between each sample's oldest token and the policy that is trained; 0 is on-policy.
        unit: Samples that are trained together.
    """

    samples: list[tuple[str, int]]
    lengths: list[int]
    waited: list[int]
    staleness: list[int]
    unit: Unit = "group"

    @property
    def group_staleness(self) -> list[int]:
        """Staleness of each group's oldest token, in versions; of each sample where ``unit`` is ``trajectory``."""
        if self.unit == "trajectory":
            return self.staleness
        oldest: dict[str, int] = {}
        for (uid, _), staleness in zip(self.samples, self.staleness, strict=True):
            oldest[uid] = max(staleness, oldest.get(uid, 0))
        return list(oldest.values())


@dataclass
class StepCounts:
    """Counts since the last batch.

    Attributes:
        loaded, dropped: Prompts.
        interrupted: Running samples that were interrupted.
        stale: Samples, finished or (where they span versions) running, that became too stale and are regenerated.
        abandoned: Attempts that were lost, or abandoned since they kept the others waiting.
        failed: Attempts of which the agent loop, a tool or the reward raised.
        wasted_tokens: Generated tokens that will not be trained.
    """

    loaded: int = 0
    dropped: int = 0
    interrupted: int = 0
    stale: int = 0
    abandoned: int = 0
    failed: int = 0
    wasted_tokens: int = 0


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
