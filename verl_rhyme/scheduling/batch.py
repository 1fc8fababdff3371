"""An update batch, and the counts of what happened since the last one."""

from __future__ import annotations

from dataclasses import dataclass

from verl_rhyme.scheduling.attempts import Attempt, Record
from verl_rhyme.scheduling.rules import Unit


@dataclass(frozen=True)
class Collected:
    """The samples of an update batch."""

    samples: list[tuple[str, int]]  # (uid, number in the group), shortest first
    lengths: list[int]  # tokens
    waited: list[int]  # training steps that left out each sample's prompt
    staleness: list[int]  # versions between each sample's oldest token and the trained policy; 0 is on-policy
    unit: Unit = "group"  # samples that are trained together

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
    """Counts since the last batch."""

    loaded: int = 0  # prompts
    dropped: int = 0  # prompts
    interrupted: int = 0  # running samples
    stale: int = 0  # samples, finished or (where they span versions) running, too stale: regenerated
    abandoned: int = 0  # attempts that were lost, or kept the others waiting
    failed: int = 0  # attempts of which the agent loop, a tool or the reward raised
    unrewarded: int = 0  # generated responses lost with their worker before their reward: regenerated
    wasted_tokens: int = 0  # generated, and will not be trained


@dataclass
class Batch:
    """An update batch, and the statistics since the last one."""

    collected: Collected
    attempts: list[Attempt]  # of the samples with trajectories
    version: int  # of the policy that it trains
    trained: list[Record]  # request records of these samples
    ran: list[tuple[float, float]]  # start and end of the requests that ended since the last batch
    wasted: list[Record]  # of attempts whose tokens will not be trained
    counts: StepCounts
    left: int  # finished samples outside the batch
    failed: int  # prompts dropped since the last batch because a sample failed
    filtered: dict[float, int]  # groups dropped since the last batch, by their common score
