"""Start of a rollout replica while others serve, and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, remove_placement_group

from verl_rhyme.processes import background

#: Seconds within which a new replica must be up, its engine compiled.
_START_S = 1200.0
#: Seconds for which a failed start is retried, because devices of dead processes become free with a delay, and seconds
#: between two tries.
_FREE_S, _PAUSE_S = 10.0, 2.0


class ReplicaStart:
    """Start of a verl replica, in a thread; ``make`` returns one that is not started."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._replica: Any = None
        self._given_up = False
        self.began = time.monotonic()
        self.up: Future[Any] = background.run_in_thread(self._run)

    def has_devices(self) -> bool:
        """Return whether the replica has all its devices, or its start is over."""
        pool = getattr(self._replica, "resource_pool", None)
        return self.up.done() or bool(pool is not None and pool.pgs)

    def check(self) -> None:
        """End a start that takes too long: kill the replica's actors, which also ends the thread, and raise
        ``TimeoutError``."""
        if self.up.done() or time.monotonic() - self.began < _START_S:
            return
        self._given_up = True
        if self._replica is not None:
            kill_replica(self._replica)
        raise TimeoutError(f"the replica was not up after {_START_S:.0f} s")

    def _run(self) -> Any:
        while True:
            self._replica = new = self._make()
            try:
                asyncio.run(new.init_standalone())
            except BaseException:
                kill_replica(new)
                if time.monotonic() - self.began >= _FREE_S:
                    raise
                time.sleep(_PAUSE_S)
            else:
                if self._given_up:  # the replica may have requested devices since
                    kill_replica(new)
                return new


def kill_replica(replica: Any) -> None:
    """Kill the actors of a replica and release the devices that it holds or has requested."""
    for actor in [*replica.servers, *replica.workers]:
        ray.kill(actor)
    pool = replica.resource_pool
    if pool is None:
        return
    groups = list(pool.pgs or [])
    if not groups:  # verl sets them only once they are ready
        name = f"{pool.name_prefix}verl_group_{'_'.join(map(str, pool.store))}:"
        for number in range(len(pool.store)):
            with suppress(ValueError):  # no such group
                groups.append(get_placement_group(f"{name}{number}"))
    for group in groups:
        remove_placement_group(group)
