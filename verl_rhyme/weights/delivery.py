"""Weight updates of one replica: one version at a time, always the newest requested one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import ray

from verl_rhyme.weights.folder import WeightsError

#: Seconds that an engine has to load a version from its node.
_LOAD_S = 1800.0


@dataclass(frozen=True)
class Target:
    """The part of a replica that weight updates need: its rank, and handles of its servers and workers."""

    rank: int
    servers: tuple[Any, ...]
    workers: tuple[Any, ...]

    @classmethod
    def of(cls, replica: Any) -> Target:
        """Make the target of verl's ``RolloutReplica``, which itself would pickle vLLM and the whole config."""
        return cls(replica.replica_rank, tuple(replica.servers), tuple(replica.workers))

    async def idle(self) -> None:
        """Wait until the replica has no running requests."""
        await self.servers[0].idle.remote()

    async def load(self, version: int) -> None:
        """Abort running requests and load a version, in the order of verl's manager and of vLLM's replica.

        Raises:
            RayError, TimeoutError: The load failed. The replica is killed: its engine may hold half of the version.
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
        """Kill the replica's actors; it is then replaced like a dead one."""
        for actor in (*self.servers, *self.workers):
            ray.kill(actor)

    async def _all(self, method: str) -> None:
        await _every(getattr(server, method).remote() for server in self.servers)


class Delivery:
    """Weight updates of one replica.

    Args:
        here: Context that waits until a version is on the replica's node and keeps it there during the load.
    """

    def __init__(self, here: Callable[[int], AbstractAsyncContextManager[None]]) -> None:
        self._here = here
        self._lock, self._hurry = asyncio.Lock(), asyncio.Event()
        self._wanted = self._urgent = self._served = -1

    async def take(self, replica: Target, version: int, patient: bool) -> None:
        """Load a version, or a newer one that was requested meanwhile.

        Args:
            replica: Replica to update.
            version: Policy version; the server reports it with each response.
            patient: Whether to wait until requests of older versions have finished, unless an impatient call comes;
                else running requests are aborted.

        Raises:
            WeightsError: The newest requested version did not reach the node.
            RayError, TimeoutError: See :meth:`Target.load`.
        """
        self._wanted = max(self._wanted, version)
        if not patient:
            self._urgent = max(self._urgent, version)
            self._hurry.set()
        async with self._lock:
            if self._served < version and patient:
                await _first(replica.idle(), self._hurry)
            while self._served < version:  # else another call has loaded it
                newest = self._wanted
                try:
                    async with self._here(newest):
                        await replica.load(newest)
                        self._served = newest
                except WeightsError:
                    if newest == self._wanted:
                        raise  # else a newer version replaced it before it arrived
            if self._urgent <= self._served:
                self._hurry.clear()

    def forget(self, version: int) -> None:
        """Note that a version is written again and must be loaded again."""
        self._served = min(self._served, version - 1)


async def _every(calls: Iterable[Awaitable[Any]]) -> None:
    """Wait for all calls, then raise the first error: no call is in flight afterwards."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _first(idle: Awaitable[None], hurry: asyncio.Event) -> None:
    """Wait until the replica is idle or ``hurry`` is set."""
    waits: set[asyncio.Future[Any]] = {asyncio.ensure_future(idle), asyncio.ensure_future(hurry.wait())}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in done:
            wait.result()
    finally:
        for wait in waits:
            wait.cancel()
