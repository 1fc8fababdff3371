"""Weight updates of one replica: one version at a time, always the newest requested one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import ray

from verl_rhyme.weights.folder import WeightsError
from verl_rhyme.weights.samples import Held, Sent, compare

#: Seconds that an engine has to load a version from its node.
_LOAD_S = 1800.0


@dataclass(frozen=True)
class Target:
    """The part of a replica that weight updates need: its rank, servers and workers."""

    rank: int
    servers: tuple[Any, ...]
    workers: tuple[Any, ...]

    @classmethod
    def of(cls, replica: Any) -> Target:
        """Make the target of verl's ``RolloutReplica``, which itself would pickle vLLM and the whole config."""
        return cls(replica.replica_rank, tuple(replica.servers), tuple(replica.workers))

    async def wait_idle(self) -> None:
        await self.servers[0].idle.remote()

    async def load(self, version: int, sent: Sent | None) -> None:
        """Abort running requests and load a version, in the order of verl's manager and of vLLM's replica.

        A replica whose load fails is killed: its engine may hold half of the version. One that does not hold what the
        actor has ``sent`` serves no more; raises WeightsError.
        """
        await self._all("abort_all_requests")
        await self._all("release_kv_cache")
        try:
            updates = [worker.update_weights.remote(global_steps=version) for worker in self.workers]
            await asyncio.wait_for(_every(updates), _LOAD_S)
        except Exception:
            self.kill()
            raise
        if sent is not None:
            compare(self.rank, sent, [Held(**each) for each in await self.servers[0].held_weights.remote()])
        await self._all("resume_kv_cache")
        await self.servers[0].resume_engine_generation.remote()
        await self._all("open_submission_gate")

    def kill(self) -> None:
        """Kill the replica's actors; it is then replaced like a dead one."""
        for actor in (*self.servers, *self.workers):
            ray.kill(actor)

    async def _all(self, method: str) -> None:
        await _every(getattr(server, method).remote() for server in self.servers)


class Delivery:
    """Weight updates of one replica; ``on_node`` waits for a version on its node and keeps it there during the load."""

    def __init__(self, on_node: Callable[[int], AbstractAsyncContextManager[None]]) -> None:
        self._on_node = on_node
        self._lock, self._hurry = asyncio.Lock(), asyncio.Event()
        self._wanted = self._urgent = self._loaded = -1
        self._sent: dict[int, Sent | None] = {}

    async def update(self, replica: Target, version: int, patient: bool, sent: Sent | None = None) -> None:
        """Load a version, or a newer one that was requested meanwhile.

        If ``patient``, wait until requests of older versions have finished, unless an impatient call comes; else abort
        them. Raises WeightsError if the newest requested version did not reach the node, or the replica holds other
        weights than were ``sent``; RayError or TimeoutError if the load failed.
        """
        self._wanted = max(self._wanted, version)
        self._sent = {known: each for known, each in self._sent.items() if known >= self._loaded} | {version: sent}
        if not patient:
            self._urgent = max(self._urgent, version)
            self._hurry.set()
        async with self._lock:
            if self._loaded < version and patient:
                await _first(replica.wait_idle(), self._hurry.wait())
            while self._loaded < version:  # else another call has loaded it
                newest = self._wanted
                try:
                    async with self._on_node(newest):
                        await replica.load(newest, self._sent[newest])
                        self._loaded = newest
                except WeightsError:
                    if newest == self._wanted:
                        raise  # else a newer version replaced it before it arrived
            if self._urgent <= self._loaded:
                self._hurry.clear()


async def _every(calls: Iterable[Awaitable[Any]]) -> None:
    """Wait for all calls, then raise the first error: no call is in flight afterwards."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def _first(*calls: Awaitable[Any]) -> None:
    waits = [asyncio.ensure_future(call) for call in calls]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in done:
            wait.result()
    finally:
        for wait in waits:
            wait.cancel()
