"""Replicas and their loads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from verl_rhyme.planning.cost import TYPICAL, ReplicaCost

#: Rows of ``running``.
REQUESTS, TOKENS = 0, 1

Counts = npt.NDArray[np.int64]


class Fleet:
    """Loads by replica. Changes of replicas and capacities cost time in the number of replicas, all else is constant.

    Attributes:
        names: Names of the replicas, in the order of the columns below.
        index: Column by name.
        running: int64[2, replicas], requests and their KV tokens (the known ones).
        capacity: float64[replicas], KV tokens that fit; infinite where not reported.
        share: float64[replicas], fair share of the load: by capacity if all are known, else equal.
        totals: Sums of ``running``.
        version: Counter of changes of replicas and capacities.
        cost: Cost of a replica's work.
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
        """Add a replica; a known one is unchanged."""
        if replica in self.index:
            return
        self.index[replica] = len(self.names)
        self.names.append(replica)
        self.running = np.pad(self.running, ((0, 0), (0, 1)))
        self.capacity = np.append(self.capacity, np.inf)
        self._settle()

    def remove(self, replica: str) -> None:
        """Remove a replica with its load.

        Raises:
            KeyError: Unknown replica.
        """
        i = self.index[replica]
        del self.names[i]
        self.index = {name: j for j, name in enumerate(self.names)}
        self.running = np.delete(self.running, i, axis=1)
        self.capacity = np.delete(self.capacity, i)
        self._settle()

    def report(self, replica: str, capacity: int) -> None:
        """Set the KV tokens that fit into a replica's cache.

        Raises:
            KeyError: Unknown replica.
        """
        self.capacity[self.index[replica]] = capacity
        self._settle()

    def room(self, replica: str) -> float:
        """Return the KV tokens that fit into a replica's cache; infinite where unknown.

        Raises:
            KeyError: Unknown replica.
        """
        return float(self.capacity[self.index[replica]])

    def _settle(self) -> None:
        self.version += 1
        known = np.isfinite(self.capacity)
        weight = self.capacity if known.all() else np.ones(len(self.names))
        self.share = weight / weight.sum() if len(weight) else weight
        self.totals = [int(n) for n in self.running.sum(axis=1)]

    def run(self, replica: str, requests: int, tokens: int) -> None:
        """Add requests and tokens to a replica's load; negative numbers subtract."""
        i = self.index[replica]
        for row, more in ((REQUESTS, requests), (TOKENS, tokens)):
            self.running[row, i] += more
            self.totals[row] += more

    def requests(self, replica: str) -> int:
        """Return the number of requests on a replica; 0 for an unknown one."""
        i = self.index.get(replica)
        return 0 if i is None else self.running.item(REQUESTS, i)

    def least(self) -> npt.NDArray[np.intp]:
        """Return the columns of the replicas with the fewest requests."""
        requests = self.running[REQUESTS]
        return (requests == requests.min()).nonzero()[0]

    def least_tokens(self, among: npt.NDArray[np.intp] | None = None) -> int:
        """Return the column of the replica with the fewest tokens for its share; fewer requests decide among equals.

        Args:
            among: Columns to choose from; ``None``: all.
        """
        # Loads are whole numbers far below 2**40: requests never outweigh a token.
        load = (self.running[TOKENS] + self.running[REQUESTS] * 2.0**-20) / self.share
        return int(load.argmin()) if among is None else int(among[load[among].argmin()])
