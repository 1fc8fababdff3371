"""Samples of one prompt on one replica, where they help each other's drafts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from verl_rhyme.placement.fleet import Fleet
from verl_rhyme.placement.policy import Request


def prompt_of(request: Request) -> str:
    """Its key; one without is nobody's sibling."""
    return request.key or request.id


class Together:
    """Who runs with siblings, by prompt and replica."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}  # running, came since one does

    def __len__(self) -> int:
        return len(self._counts)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._counts)

    def started(self, request: Request, replica: str) -> None:
        counts = self._counts.setdefault((prompt_of(request), replica), [0, 0])
        counts[0] += 1
        counts[1] += 1

    def released(self, request: Request, replica: str) -> None:
        at = prompt_of(request), replica
        self._counts[at][0] -= 1
        if not self._counts[at][0]:
            del self._counts[at]

    def came(self, prompt: str, replica: str) -> int:
        """How many of a prompt came to a replica since one runs there; 0 where none does."""
        return self._counts.get((prompt, replica), (0, 0))[1]


class Pairs:
    """Of B requests: who goes with whom, and who is beside a sibling in a plan.

    Args:
        requests: These.
        fleet: Where they may run.
        running: Prompts and replicas of what runs.

    Attributes:
        after: int64[B], the sibling before it of which it is the second, or at the end of an odd group the third; -1.
    """

    def __init__(self, requests: Sequence[Request], fleet: Fleet, running: Iterable[tuple[str, str]]) -> None:
        keys: dict[str, int] = {}
        self._keys = np.array([keys.setdefault(prompt_of(request), len(keys)) for request in requests])
        self._replicas = len(fleet)
        there = [keys[key] * len(fleet) + fleet.index[replica] for key, replica in running if key in keys]
        self._running = np.array(there, np.int64)
        order = np.argsort(self._keys, kind="stable")
        first = np.flatnonzero(np.diff(self._keys[order], prepend=-1))
        size = np.diff(first, append=len(order))
        rank = np.arange(len(order)) - np.repeat(first, size)
        last = rank == np.repeat(size, size) - 1
        follows = (rank % 2 == 1) | (last & (rank > 0))
        self.after = np.full(len(order), -1)
        self.after[order[follows]] = order[np.flatnonzero(follows) - 1]

    def together(self, where: np.ndarray) -> np.ndarray:
        """bool[B], at least one sibling is on the replica that it has in a plan."""
        place = self._keys * self._replicas + where
        _, at, count = np.unique(place, return_inverse=True, return_counts=True)
        return (count[at] > 1) | np.isin(place, self._running)
