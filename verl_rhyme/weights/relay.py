"""The relay: one copy of each version of the weights on each node, which the node's replicas take when told to.

Nodes pass a version on in a tree, chunk by chunk: those that are far from the actor begin before those that are near
have all of it (:mod:`~verl_rhyme.weights.sites`: who asks whom). What is missing and what is right is
:mod:`~verl_rhyme.weights.transfer`'s to know; here questions and answers go by Ray calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_rhyme.observability.audible import keep_audible
from verl_rhyme.observability.errors import last_line
from verl_rhyme.weights.delivery import Delivery, Target
from verl_rhyme.weights.folder import SHARED_MEMORY, Folder, UnsentError, WeightsError, claim
from verl_rhyme.weights.receiving import LinkError, Patience, Receiver, ask_parts, base_of, begin
from verl_rhyme.weights.sending import Base, Sender
from verl_rhyme.weights.transfer import Chunk, Part, all_chunks, identity

logger = logging.getLogger(__name__)

#: Versions that a node keeps: the newest, and the one that some may still be taking; the next is sent against it.
KEPT = 2
#: Calls at a time: of nodes that wait for chunks, and of replicas that wait for a version.
_CALLS = 1024


class RaySource:
    """:class:`~verl_rhyme.weights.receiving.Source` by calls of another node's relay, perhaps a far one."""

    def __init__(self, relay: Any, far: bool) -> None:
        self._relay, self._far = relay, far

    async def parts(self, version: int) -> list[Part]:
        return await _answered(self._relay.parts.remote(version))

    async def chunk(self, version: int, chunk: Chunk, base: Base | None, pack: bool) -> np.ndarray:
        return await _answered(self._relay.chunk.remote(version, chunk, base, pack, self._far))


async def _answered(call: Any) -> Any:
    try:
        return await call
    except (ActorUnavailableError, ObjectLostError) as error:  # the network between: it may come back
        raise LinkError(last_line(error)) from error


class Relay:
    """See the module; :func:`start` makes it the actor of a node.

    Args:
        root: Where its folder is made; ``None``: in shared memory.
        heir_of: The folder of the relay in whose place it is started.
        pack: What goes between sites is packed, and against the version before.
        silence: Seconds for which a source is waited for that sends nothing.
    """

    def __init__(
        self, root: str | None = None, heir_of: str | None = None, pack: bool = True, silence: float = 600.0
    ) -> None:
        keep_audible()
        self._folder: Folder = claim(SHARED_MEMORY if root is None else Path(root), heir_of)
        self._sender = Sender(self._folder)
        self._pack, self._patience = pack, Patience(min(60.0, silence), silence)
        self._tally: Counter[str] = Counter()
        self._asked: dict[int, float] = {}  # when another site last asked for a version, or against it
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()  # also those of versions that are none any more
        self._wanted: dict[int, str] = {}  # identities, as the trainer tells them
        self._told: dict[int, list[Part]] = {}  # of versions that are here, or come
        self._changed = asyncio.Condition()
        self._here: dict[int, set[Chunk]] = {}  # chunks that came
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
        await self._notify()
        for delivery in self._deliveries.values():
            delivery.forget(version)

    async def close(self) -> None:
        """The run ends: what is here goes, and nothing comes any more."""
        for fetch in self._running:
            fetch.cancel()
        if self._running:
            await asyncio.wait(self._running)
        self._folder.close()

    async def tally(self) -> dict[str, int]:
        """What was fetched since the last call: :class:`~verl_rhyme.weights.transfer.Counts`, and ``far_bytes``
        from other sites.
        """
        told, self._tally = self._tally, Counter()
        return dict(told)

    # ---- the actor's node ----

    async def written(self, version: int) -> str:
        """The actor has written it; its identity.

        Raises:
            WeightsError: It has not.
        """
        parts = self._folder.parts(version)
        self._here[version], self._told[version] = set(all_chunks(parts)), parts
        self._wanted[version] = identity(parts)
        await self._notify()
        return self._wanted[version]

    async def revive(self, version: int, wanted: str) -> bool:
        """Whether a relay that died has left that version whole here."""
        if not await asyncio.to_thread(self._folder.revive, version, wanted):
            return False
        await self.written(version)
        return True

    # ---- between nodes ----

    async def parts(self, version: int) -> list[Part]:
        """As soon as they are known here.

        Raises:
            WeightsError: The version has made room for others.
        """
        await self._until(version, lambda: version in self._told)
        return self._told[version]

    async def chunk(
        self, version: int, chunk: Chunk, base: Base | None = None, pack: bool = False, far: bool = False
    ) -> np.ndarray:
        """uint8[M], coded, as soon as it is here; to another site where ``far``. Raises as :meth:`parts`."""
        await self._until(version, lambda: chunk in self._here.get(version, ()))
        parts = self._told[version]
        if far:
            self._asked |= dict.fromkeys((version, *(base or ())[:1]), asyncio.get_running_loop().time())
        return await asyncio.to_thread(self._sender.answer, version, chunk, parts, base, pack)

    async def fetch(self, version: int, wanted: str, sources: list[tuple[Any, bool]]) -> None:
        """Begin to fetch a version from another node's relay, where that cannot give it from the next one; who takes it
        here learns what went wrong. Once for a version, unless that failed.

        Args:
            version: Its number.
            wanted: Its identity: what has another one is not it, whatever its number.
            sources: Relays, each with whether it is at another site.
        """
        self._want(version, wanted)
        known = self._fetches.get(version)
        if version in self._folder.versions() or (known is not None and not known.done()):
            return
        fetch = asyncio.create_task(self._fetch_from(version, wanted, sources, list(self._running)))
        fetch.add_done_callback(lambda each: each.cancelled() or each.exception())  # perhaps nobody takes this version
        fetch.add_done_callback(self._running.discard)
        self._running.add(fetch)
        self._fetches[version] = fetch

    async def _fetch_from(
        self, version: int, wanted: str, sources: list[tuple[Any, bool]], before: list[asyncio.Task[None]]
    ) -> None:
        if before:  # there is room for one at a time
            await asyncio.wait(before)
        for other in self._folder.unfinished():
            if other != version:
                self._folder.remove(other)
        self._forget(version)
        self._gone.discard(version)
        await self._notify()
        if await self.revive(version, wanted):
            return
        receiver: Receiver | None = None
        for left, (relay, far) in zip(reversed(range(len(sources))), sources, strict=True):
            source = RaySource(relay, far)
            try:
                parts = await ask_parts(source, version, self._patience)
                if identity(parts) != wanted:
                    raise WeightsError(f"what a node has as weights {version} are others")
                if receiver is None:
                    receiver = await self._receiver(version, parts)
                await self._receive(receiver, source, version, far)
                return
            except Exception as error:
                if not left or not isinstance(error, (RayError, LinkError, WeightsError)):
                    if self._fetches.get(version) is not asyncio.current_task():
                        raise  # it is written anew meanwhile
                    self._told.pop(version, None)
                    self._here.pop(version, None)  # what came stays in the folder, and is not sent again
                    self._gone.add(version)
                    await self._notify()
                    raise
                logger.warning("weights %d are fetched from another node: %s", version, last_line(error))

    async def _receiver(self, version: int, parts: list[Part]) -> Receiver:
        transfer = await begin(self._folder, version, parts)
        here = set(all_chunks(parts)) - set(transfer.missing)
        if here:
            logger.warning("weights %d: the transfer goes on, %d chunks are here", version, len(here))
        self._here[version], self._told[version] = here, parts
        await self._notify()

        async def kept(chunk: Chunk) -> None:
            self._here[version].add(chunk)
            await self._notify()

        return Receiver(self._folder, version, transfer, kept, self._patience)

    async def _receive(self, receiver: Receiver, source: RaySource, version: int, far: bool) -> None:
        before = Counter(asdict(receiver.counts))
        try:
            await receiver.fetch(source, base_of(self._folder, version), far and self._pack)
        finally:
            came = Counter(asdict(receiver.counts))
            came.subtract(before)
            self._tally.update(came)
            self._tally["far_bytes"] += came["bytes"] * far
            if came["whole"] > came["chunks"] / 2:
                logger.warning(
                    "weights %d: %d of %d chunks came whole from another site, not as what changed: the version before "
                    "is no longer there, or has another layout",
                    *(version, came["whole"], came["chunks"]),
                )

    # ---- replicas ----

    async def deliver(self, replica: Target, version: int, patient: bool = False, wanted: str | None = None) -> None:
        """Have a replica of this node take a version, as soon as it is here. As :meth:`Delivery.take`.

        Args:
            wanted: The version's identity; ``None``: as it was told before.
        """
        if wanted is not None:
            self._want(version, wanted)
        delivery = self._deliveries.setdefault(replica.rank, Delivery(self._held))
        await delivery.take(replica, version, patient)

    async def forget(self, rank: int) -> None:
        """A replica rests: when it returns it takes a version whatever it has had."""
        self._deliveries.pop(rank, None)

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
        while version not in self._folder.versions():
            if (fetch := self._fetches.get(version)) is None:
                raise UnsentError(f"nobody has sent weights {version} to this node; it has {self._folder.versions()}")
            try:
                return await asyncio.shield(fetch)
            except RayActorError as error:  # another may be in its place
                raise UnsentError(f"weights {version} could not be fetched from a node: {last_line(error)}") from error
            except (RayError, LinkError) as error:
                raise WeightsError(f"weights {version} could not be fetched from another node: {error}") from error
            except asyncio.CancelledError:
                if not fetch.cancelled():
                    raise  # else they are written anew

    def _want(self, version: int, wanted: str) -> None:
        """What is here of that number, or comes, and is another version, goes."""
        known = self._wanted.get(version)
        if known is None and version in self._folder.versions():
            known = identity(self._folder.parts(version))
        if known not in (None, wanted):
            self._remove(version)
            for delivery in self._deliveries.values():
                delivery.forget(version)
        self._wanted[version] = wanted

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, version: int, here: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: here() or version in self._gone)
        if not here():
            raise WeightsError(f"weights {version} have made room for newer ones")

    def _forget(self, coming: int) -> None:
        """What no replica takes any more, but for the newest, and one that another site is at: if it went, a site that
        is slower than updates come would never have any.
        """
        others = [version for version in self._folder.versions() if version != coming]
        old = others[: max(0, len(others) - KEPT + 1)]
        since = asyncio.get_running_loop().time() - self._patience.answer
        asked = [version for version in old if self._asked.get(version, since) > since]
        for version in old:
            if not self._taking[version] and version not in asked[-1:] and not self._folder.read_now(version):
                self._remove(version)

    def _remove(self, version: int) -> None:
        self._folder.remove(version)
        self._gone.add(version)
        if fetch := self._fetches.get(version):
            fetch.cancel()
        for known in (self._told, self._here, self._fetches, self._asked, self._wanted):
            known.pop(version, None)


def start(node: str, root: str | None, *options: Any) -> Any:
    """The relay of a Ray node, with :class:`Relay`'s further options. It ends with the process that starts it."""
    return (
        ray.remote(Relay)
        .options(
            num_cpus=0,
            max_concurrency=_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        )
        .remote(root, *options)
    )
