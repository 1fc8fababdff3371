"""The relay: one copy of each version of the weights on each node, which the node's replicas take when told to.

Nodes pass a version on in a tree, part by part: no node sends it more than twice, and those that are far from the actor
begin before those that are near have all of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_rhyme.observability.audible import keep_audible
from verl_rhyme.observability.errors import last_line
from verl_rhyme.workers.weights.delivery import Delivery, Target
from verl_rhyme.workers.weights.folder import SHARED_MEMORY, Folder, Part, WeightsError, claim

logger = logging.getLogger(__name__)

#: Versions that a node keeps: the newest, and the one that some may still be taking.
KEPT = 2
#: Parts that are on their way to a node at a time, and how often one is asked for that came damaged.
_AT_A_TIME, _TRIES = 2, 3
#: Calls at a time: of nodes that wait for parts, and of replicas that wait for a version.
_CALLS = 1024


class Relay:
    """See the module; :func:`start` makes it the actor of a node.

    Args:
        root: Where its folder is made; ``None``: in shared memory.
    """

    def __init__(self, root: str | None = None) -> None:
        keep_audible()
        self._folder: Folder = claim(SHARED_MEMORY if root is None else Path(root))
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._told: dict[int, list[Part]] = {}  # of versions that are here, or come
        self._changed = asyncio.Condition()
        self._here: dict[int, set[int]] = {}  # parts that came
        self._gone: set[int] = set()  # versions that made room for others
        self._taking: Counter[int] = Counter()  # replicas that take a version
        self._deliveries: dict[int, Delivery] = {}  # by the replica's rank

    async def folder(self) -> str:
        return str(self._folder.path)

    async def expect(self, version: int) -> None:
        """A version is about to be written: older ones make room, and one of that number is not it."""
        self._forget(version)
        self._remove(version)
        self._gone.discard(version)
        await self._tell()
        for delivery in self._deliveries.values():
            delivery.forget(version)

    async def close(self) -> None:
        """The run ends: what is here goes."""
        self._folder.close()

    # ---- the actor's node ----

    async def written(self, version: int) -> None:
        """The actor has written it.

        Raises:
            WeightsError: It has not.
        """
        parts = self._folder.parts(version)
        self._here[version], self._told[version] = set(range(len(parts))), parts
        await self._tell()

    # ---- between nodes ----

    async def parts(self, version: int) -> list[Part]:
        """As soon as they are known here.

        Raises:
            WeightsError: The version has made room for others.
        """
        await self._until(version, lambda: version in self._told)
        return self._told[version]

    async def part(self, version: int, number: int) -> np.ndarray:
        """uint8[N], as soon as it is here. Raises as :meth:`parts`."""
        await self._until(version, lambda: number in self._here.get(version, ()))
        return np.frombuffer(await asyncio.to_thread(self._folder.part, version, number), np.uint8)

    async def fetch(self, version: int, sources: list[Any]) -> None:
        """Begin to fetch a version from another node's relay, where that cannot give it from the next one; who takes it
        here learns what went wrong. Once for a version, unless that failed.
        """
        known = self._fetches.get(version)
        if version in self._folder.versions() or (known is not None and not known.done()):
            return
        before = [fetch for fetch in self._fetches.values() if not fetch.done()]
        self._fetches[version] = asyncio.create_task(self._fetch_from(version, sources, before))

    async def _fetch_from(self, version: int, sources: list[Any], before: list[asyncio.Task[None]]) -> None:
        if before:  # there is room for one at a time
            await asyncio.wait(before)
        self._forget(version)
        await self._tell()
        for left, source in zip(reversed(range(len(sources))), sources, strict=True):
            try:
                await self._fetch(version, source)
                return
            except (RayError, WeightsError) as error:
                self._folder.remove(version)
                if not left:
                    raise
                logger.warning("weights %d are fetched from another node: %s", version, last_line(error))

    async def _fetch(self, version: int, source: Any) -> None:
        parts = await source.parts.remote(version)
        self._folder.remove(version)
        self._here[version], self._told[version] = set(), parts
        await self._tell()
        at_a_time = asyncio.Semaphore(_AT_A_TIME)

        async def one(number: int, part: Part) -> None:
            async with at_a_time:
                for left in reversed(range(_TRIES)):
                    data = memoryview(await source.part.remote(version, number))
                    try:
                        await asyncio.to_thread(self._folder.put, version, number, data, part)
                        break
                    except WeightsError as error:
                        if not left:
                            raise
                        logger.warning("%s; it is fetched again", error)
            self._here[version].add(number)
            await self._tell()

        fetches = [asyncio.create_task(one(number, part)) for number, part in enumerate(parts)]
        try:
            await asyncio.gather(*fetches)
        finally:  # none goes on beside another try
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)
        self._folder.complete(version, parts)

    # ---- replicas ----

    async def deliver(self, replica: Target, version: int, patient: bool = False) -> None:
        """Have a replica of this node take a version, as soon as it is here. As :meth:`Delivery.take`."""
        delivery = self._deliveries.setdefault(replica.rank, Delivery(self._held))
        await delivery.take(replica, version, patient)

    # ---- within ----

    @asynccontextmanager
    async def _held(self, version: int) -> AsyncIterator[None]:
        self._taking[version] += 1
        try:
            await self._arrived(version)
            yield
        finally:
            self._taking[version] -= 1

    async def _arrived(self, version: int) -> None:
        if version in self._folder.versions():
            return
        if (fetch := self._fetches.get(version)) is None:
            raise WeightsError(f"nobody has sent weights {version} to this node; it has {self._folder.versions()}")
        try:
            await asyncio.shield(fetch)
        except RayError as error:
            raise WeightsError(f"weights {version} could not be fetched from another node: {error}") from error

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, version: int, here: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: here() or version in self._gone)
        if not here():
            raise WeightsError(f"weights {version} have made room for newer ones")

    def _forget(self, coming: int) -> None:
        """What no replica takes any more, but for the newest."""
        others = [version for version in self._folder.versions() if version != coming]
        for version in others[: max(0, len(others) - KEPT + 1)]:
            if not self._taking[version]:
                self._remove(version)

    def _remove(self, version: int) -> None:
        self._folder.remove(version)
        self._gone.add(version)
        for known in (self._told, self._here, self._fetches):
            known.pop(version, None)


def start(node: str, root: str | None) -> Any:
    """The relay of a Ray node. It ends with the process that starts it."""
    return (
        ray.remote(Relay)
        .options(
            num_cpus=0,
            max_concurrency=_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        )
        .remote(root)
    )
