"""How one rollout replica starts while others serve, and how it ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, remove_placement_group

#: Seconds that a new replica has to be up, its engine compiled.
_START_S = 1200.0
#: Seconds for which a start is tried again at once, as devices come free a while after those that held them died, and
#: between two tries.
_FREE_S, _PAUSE_S = 10.0, 2.0


class Start:
    """A replica that is started in a thread of its own, while others serve.

    Args:
        make: Another of verl's replicas, which is not started.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._replica: Any = None
        self._given_up = False
        self.began = time.monotonic()
        self.up: Future[Any] = Future()
        threading.Thread(target=self._run, daemon=True).start()

    def seated(self) -> bool:
        """It has all its devices, or will not have them."""
        pool = getattr(self._replica, "resource_pool", None)
        return self.up.done() or bool(pool is not None and pool.pgs)

    def check(self) -> None:
        """Wait no longer for one that should be up: what it holds goes, and its thread ends with that.

        Raises:
            TimeoutError: It should be.
        """
        if self.up.done() or time.monotonic() - self.began < _START_S:
            return
        self._given_up = True
        if self._replica is not None:
            end(self._replica)
        raise TimeoutError(f"it was not up after {_START_S:.0f} s")

    def _run(self) -> None:
        try:
            while True:
                self._replica = new = self._make()
                try:
                    asyncio.run(new.init_standalone())
                except BaseException:
                    end(new)
                    if time.monotonic() - self.began >= _FREE_S:
                        raise
                    time.sleep(_PAUSE_S)
                else:
                    self.up.set_result(new)
                    if self._given_up:  # what it has asked for since, nobody will use
                        end(new)
                    return
        except BaseException as error:
            self.up.set_exception(error)


def end(replica: Any) -> None:
    """What is left of it goes, with the devices that it held, or has asked for."""
    for actor in [*replica.servers, *replica.workers]:
        ray.kill(actor)
    pool = replica.resource_pool
    if pool is None:
        return
    groups = list(pool.pgs or [])
    if not groups:  # verl has them from where they are ready
        name = f"{pool.name_prefix}verl_group_{'_'.join(map(str, pool.store))}:"
        for number in range(len(pool.store)):
            with suppress(ValueError):  # there is none
                groups.append(get_placement_group(f"{name}{number}"))
    for group in groups:
        remove_placement_group(group)
