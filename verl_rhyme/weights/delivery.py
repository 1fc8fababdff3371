"""How one replica takes new weights: one version at a time, the newest that it was to take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import ray

from verl_rhyme.weights.folder import WeightsError

#: Seconds that an engine has to take a version that lies on its node.
_LOAD_S = 1800.0


@dataclass(frozen=True)
class Target:
    """A replica, as far as weights go: its rank, and handles of its servers and workers."""

    rank: int
    servers: tuple[Any, ...]
    workers: tuple[Any, ...]

    @classmethod
    def of(cls, replica: Any) -> Target:
        """Of verl's ``RolloutReplica``, which drags vLLM and the whole config along."""
        return cls(replica.replica_rank, tuple(replica.servers), tuple(replica.workers))

    async def idle(self) -> None:
        """Wait until nothing runs there."""
        await self.servers[0].idle.remote()

    async def load(self, version: int) -> None:
        """What runs there is cut short. In the order of verl's manager, and of vLLM's replica.

        Raises:
            RayError, TimeoutError: It could not; nothing is left of the replica, whose engine may have half of it.
        """
        await self._all("abort_all_requests")
        await self._all("release_kv_cache")
        try:
            updates = [worker.update_weights.remote(global_steps=version) for worker in self.workers]
            await asyncio.wait_for(_every(updates), _LOAD_S)
        except Exception:
            self.end()
            raise
        await self._all("resume_kv_cache")
        await self.servers[0].resume_engine_generation.remote()
        await self._all("open_submission_gate")

    def end(self) -> None:
        """As one that died: it is replaced."""
        for actor in (*self.servers, *self.workers):
            ray.kill(actor)

    async def _all(self, method: str) -> None:
        await _every(getattr(server, method).remote() for server in self.servers)


class Delivery:
    """Of one replica.

    Args:
        here: Waits until a version is on the replica's node, and keeps it there while it is taken.
    """

    def __init__(self, here: Callable[[int], AbstractAsyncContextManager[None]]) -> None:
        self._here = here
        self._lock, self._hurry = asyncio.Lock(), asyncio.Event()
        self._wanted = self._urgent = self._served = -1

    async def take(self, replica: Target, version: int, patient: bool) -> None:
        """A version, or a newer one that was asked for meanwhile.

        Args:
            replica: The one.
            version: Also of the policy, as its server tells it with each response.
            patient: When nothing runs there that came under an older one, unless another call is not patient; else
                what is generated is cut short.

        Raises:
            WeightsError: The newest that was asked for did not get here.
            RayError, TimeoutError: See :meth:`Target.load`.
        """
        self._wanted = max(self._wanted, version)
        if not patient:
            self._urgent = max(self._urgent, version)
            self._hurry.set()
        async with self._lock:
            if self._served < version and patient:
                await _first(replica.idle(), self._hurry)
            while self._served < version:  # else another call has brought it
                newest = self._wanted
                try:
                    async with self._here(newest):
                        await replica.load(newest)
                        self._served = newest
                except WeightsError:
                    if newest == self._wanted:
                        raise  # else it gave way to a newer one before it had come
            if self._urgent <= self._served:
                self._hurry.clear()

    def forget(self, version: int) -> None:
        """That version will be another one."""
        self._served = min(self._served, version - 1)


async def _every(calls: Iterable[Awaitable[Any]]) -> None:
    """Wait for all of them, also when one fails: none is under way afterwards."""
    for told in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(told, BaseException):
            raise told


async def _first(idle: Awaitable[None], hurry: asyncio.Event) -> None:
    """Wait for either."""
    waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(idle), asyncio.ensure_future(hurry.wait())}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in done:
            wait.result()
    finally:
        for wait in waits:
            wait.cancel()
