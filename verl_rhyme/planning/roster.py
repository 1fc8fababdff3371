"""Which replicas generate and which rest, when the elastic rule wants one more or one less: a state machine without a
clock, and without a hand on any replica.

Replicas need not be alike (an older GPU, a node that others use as well): the one whose tokens take longest goes first,
and of those that rest the fastest returns first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

#: Share of a new measurement in a replica's pace.
_NEW = 0.5
#: Paces are told apart by so much of the usual one; what is nearer is chance.
_GRAIN = 0.1


class Change(NamedTuple):
    """A replica that is to rest, or to return.

    Attributes:
        replica: Its rank.
        serves: It is to return; else to rest.
    """

    replica: int
    serves: bool


class Roster:
    """One for a run.

    Args:
        replicas: Ranks of those that were launched.
        least, most: How many generate; ``most=None``: all. As many as may begin.

    Attributes:
        serving, resting: Ranks; each known replica is in one of them.

    Raises:
        ValueError: There are not so many.
    """

    def __init__(self, replicas: Sequence[int], least: int = 1, most: int | None = None) -> None:
        self.least, self.most = least, min(len(replicas), most or len(replicas))
        if not 1 <= least <= self.most:
            raise ValueError(f"{least} to {most or len(replicas)} replicas of {len(replicas)} that there are")
        self.serving, self.resting = list(replicas[: self.most]), list(replicas[self.most :])
        self._paces: dict[int, float] = {}

    def look(self, serving: Sequence[int], resting: Sequence[int]) -> None:
        """As it is now: some have died, others took their place."""
        here = {*serving, *resting}
        self.serving, self.resting = (
            [*(r for r in before if r in now), *(r for r in now if r not in before)]
            for before, now in ((self.serving, list(serving)), (self.resting, list(resting)))
        )
        self._paces = {replica: pace for replica, pace in self._paces.items() if replica in here}

    def paced(self, seconds: Mapping[int, float]) -> None:
        """Of some replicas it was seen how many seconds a token of a request takes there."""
        for replica, now in seconds.items():
            if replica in self.serving or replica in self.resting:
                before = self._paces.get(replica, now)
                self._paces[replica] = before + _NEW * (now - before)

    def pace(self, replica: int) -> float:
        """Its seconds a token over the usual ones; 1 where nobody knows."""
        usual = median(self._paces.values()) if self._paces else 0.0
        if not usual or replica not in self._paces:
            return 1.0
        return max(_GRAIN, round(self._paces[replica] / usual / _GRAIN) * _GRAIN)

    def order(self) -> list[int]:
        """All, such that the first n are those that generate when n do."""
        return [*sorted(self.serving, key=self.pace), *sorted(self.resting, key=self.pace)]

    def wants(self, change: int) -> Change | None:
        """Who is to rest or to return when one more (1) or one less (-1) is to generate; ``None``: nobody can."""
        if change > 0 and self.resting and len(self.serving) < self.most:
            return Change(min(self.resting, key=self.pace), True)
        if change < 0 and len(self.serving) > self.least:
            return Change(self.order()[len(self.serving) - 1], False)
        return None
