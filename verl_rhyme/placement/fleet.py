"""Replicas and their loads."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from verl_rhyme.planning.cost import TYPICAL, ReplicaCost


class Pool:
    """Some replicas of a fleet, of which some may have left since."""

    def __init__(self, name: str, names: Iterable[str]) -> None:
        self.name = name
        self.names = tuple(names)
        self._columns: tuple[int, npt.NDArray[np.intp]] = (-1, np.zeros(0, np.intp))  # by version of the fleet

    def columns(self, fleet: Fleet) -> npt.NDArray[np.intp]:
        if self._columns[0] != fleet.version:
            serving = [fleet.index[name] for name in self.names if name in fleet]
            self._columns = fleet.version, np.array(serving, np.intp)
        return self._columns[1]


class Fleet:
    """Loads by replica. Changes of replicas cost time in their number; the rest is constant."""

    def __init__(self, cost: ReplicaCost = TYPICAL) -> None:
        self.cost = cost
        self.names: list[str] = []  # in the order of the columns below
        self.index: dict[str, int] = {}  # column by name
        #: int64[replicas]: running requests, and their KV tokens (the known ones)
        self.requests, self.tokens = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.capacity = np.zeros(0)  # float64[replicas], KV tokens that fit; infinite where unknown
        self.version = 0  # counts changes of replicas

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, replica: str) -> bool:
        return replica in self.index

    def add(self, replica: str, capacity: int | None = None) -> None:
        """Add a replica, or set the KV tokens that fit into a known one; ``None`` or 0: unknown, or as before."""
        if replica not in self.index:
            self.index[replica] = len(self.names)
            self.names.append(replica)
            self.requests, self.tokens = np.append(self.requests, 0), np.append(self.tokens, 0)
            self.capacity = np.append(self.capacity, np.inf)
            self.version += 1
        if capacity:
            self.capacity[self.index[replica]] = capacity

    def remove(self, replica: str) -> None:
        i = self.index[replica]
        del self.names[i]
        self.index = {name: j for j, name in enumerate(self.names)}
        self.requests, self.tokens = np.delete(self.requests, i), np.delete(self.tokens, i)
        self.capacity = np.delete(self.capacity, i)
        self.version += 1

    def run(self, replica: str, requests: int, tokens: int) -> None:
        """Add requests and tokens to a replica's load; negative numbers subtract."""
        i = self.index[replica]
        self.requests[i] += requests
        self.tokens[i] += tokens

    def least_tokens(self, pool: Pool | None = None) -> str:
        """Return the replica with the fewest tokens; fewer requests decide among equals.

        All replicas are candidates without a pool, or if the pool's have left.
        """
        # Loads are whole numbers far below 2**40: requests never outweigh a token.
        load = self.tokens + self.requests * 2.0**-20
        columns = () if pool is None else pool.columns(self)
        return self.names[int(load.argmin()) if len(columns) == 0 else int(columns[load[columns].argmin()])]
