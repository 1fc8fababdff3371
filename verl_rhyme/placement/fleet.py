"""Replicas and what each of them carries."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from verl_rhyme.planning.cost import TYPICAL, ReplicaCost

#: Rows of ``running``.
REQUESTS, TOKENS = 0, 1

Counts = npt.NDArray[np.int64]


class Fleet:
    """Loads by replica. Adding, removing or reporting costs time in the number of replicas, all else is constant.

    Attributes:
        names: Of the replicas, in the order of the columns below.
        index: Column of each name.
        running: int64[2, replicas], requests and their KV tokens (those that are known).
        capacity: float64[replicas], KV tokens there is room for; infinite where nobody reported it.
        share: float64[replicas], what part of all load is fair: by capacity if all replicas' is known, else even.
        totals: Sums of ``running``.
        version: Changes with replicas and capacities.
        cost: What a replica's work costs.
    """

    def __init__(self, cost: ReplicaCost = TYPICAL) -> None:
        self.cost = cost
        self.names: list[str] = []
        self.index: dict[str, int] = {}
        self.running: Counts = np.zeros((2, 0), np.int64)
        self.capacity: npt.NDArray[np.float64] = np.zeros(0)
        self.share: npt.NDArray[np.float64] = np.zeros(0)
        self.totals = [0, 0]
        self.version = 0

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, replica: str) -> bool:
        return replica in self.index

    def add(self, replica: str) -> None:
        """Does nothing when it is there already."""
        if replica in self.index:
            return
        self.index[replica] = len(self.names)
        self.names.append(replica)
        self.running = np.pad(self.running, ((0, 0), (0, 1)))
        self.capacity = np.append(self.capacity, np.inf)
        self._settle()

    def remove(self, replica: str) -> None:
        """With its load.

        Raises:
            KeyError: No such replica.
        """
        i = self.index[replica]
        del self.names[i]
        self.index = {name: j for j, name in enumerate(self.names)}
        self.running = np.delete(self.running, i, axis=1)
        self.capacity = np.delete(self.capacity, i)
        self._settle()

    def report(self, replica: str, capacity: int) -> None:
        """KV tokens a replica has room for.

        Raises:
            KeyError: No such replica.
            ValueError: Capacity is not positive.
        """
        if capacity <= 0:
            raise ValueError(f"replica {replica} reports room for {capacity} KV tokens; expected more than 0")
        self.capacity[self.index[replica]] = capacity
        self._settle()

    def room(self, replica: str) -> float:
        """KV tokens it has room for; infinite where nobody said.

        Raises:
            KeyError: No such replica.
        """
        return float(self.capacity[self.index[replica]])

    def _settle(self) -> None:
        self.version += 1
        known = np.isfinite(self.capacity)
        weight = self.capacity if known.all() else np.ones(len(self.names))
        self.share = weight / weight.sum() if len(weight) else weight
        self.totals = [int(n) for n in self.running.sum(axis=1)]

    def run(self, replica: str, requests: int, tokens: int) -> None:
        """Count them in (or out, when negative)."""
        i = self.index[replica]
        for row, more in ((REQUESTS, requests), (TOKENS, tokens)):
            self.running[row, i] += more
            self.totals[row] += more

    def requests(self, replica: str) -> int:
        """Those that run on a replica; 0 where there is none of that name."""
        i = self.index.get(replica)
        return 0 if i is None else self.running.item(REQUESTS, i)

    def least(self) -> npt.NDArray[np.intp]:
        """Columns of the replicas with the fewest requests."""
        requests = self.running[REQUESTS]
        return (requests == requests.min()).nonzero()[0]

    def least_tokens(self, among: npt.NDArray[np.intp] | None = None) -> int:
        """Column of the replica with the fewest tokens for its share, of those with as few the one with the fewest
        requests.

        Args:
            among: Columns; ``None``: all.
        """
        # Loads are whole numbers far below 2**40: requests never outweigh a token.
        load = (self.running[TOKENS] + self.running[REQUESTS] * 2.0**-20) / self.share
        return int(load.argmin()) if among is None else int(among[load[among].argmin()])
