"""The relay of a node: an actor that keeps one copy of each weight version, which the node's replicas load.

Nodes pass a version on in a tree (:mod:`~verl_rhyme.weights.sites`), chunk by chunk: a node forwards chunks before it
has the whole version. :mod:`~verl_rhyme.weights.transfer` keeps the state of a transfer; here its requests and answers
are Ray calls.
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

from verl_rhyme.observability.errors import last_line
from verl_rhyme.observability.log_handler import add_log_handler
from verl_rhyme.weights.delivery import Delivery, Target
from verl_rhyme.weights.folder import SHARED_MEMORY, Folder, UnsentError, WeightsError, claim
from verl_rhyme.weights.receiving import LinkError, Patience, Receiver, ask_parts, base_of, begin
from verl_rhyme.weights.sending import Base, Sender
from verl_rhyme.weights.transfer import Chunk, Part, all_chunks, identity

logger = logging.getLogger(__name__)

#: Versions that a node keeps: the newest, and the one before, which replicas may still load and which is a base.
KEPT = 2
#: Maximum concurrent calls: of nodes that wait for chunks, and of replicas that wait for a version.
_CALLS = 1024


class RaySource:
    """:class:`~verl_rhyme.weights.receiving.Source` that calls another node's relay; ``far`` if at another site."""

    def __init__(self, relay: Any, far: bool) -> None:
        self._relay, self._far = relay, far

    async def parts(self, version: int) -> list[Part]:
        return await _result(self._relay.parts.remote(version))

    async def chunk(self, version: int, chunk: Chunk, base: Base | None, pack: bool) -> np.ndarray:
        return await _result(self._relay.chunk.remote(version, chunk, base, pack, self._far))


async def _result(call: Any) -> Any:
    try:
        return await call
    except (ActorUnavailableError, ObjectLostError) as error:  # a network error, which may pass
        raise LinkError(last_line(error)) from error


class Relay:
    """The relay of a node; :func:`start` starts it as an actor.

    Args:
        root: Parent of the weight folder; ``None`` for shared memory.
        heir_of: Weight folder of the dead relay that this one replaces.
        pack: Whether transfers between sites are compressed, against the previous version.
        silence: Seconds to wait for a source that sends nothing.
    """

    def __init__(
        self, root: str | None = None, heir_of: str | None = None, pack: bool = True, silence: float = 600.0
    ) -> None:
        add_log_handler()
        self._folder: Folder = claim(SHARED_MEMORY if root is None else Path(root), heir_of)
        self._sender = Sender(self._folder)
        self._pack, self._patience = pack, Patience(min(60.0, silence), silence)
        self._tally: Counter[str] = Counter()
        self._far_requests: dict[int, float] = {}  # when another site last requested a version or used it as base
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()  # also fetches of removed versions
        self._identities: dict[int, str] = {}  # from the trainer
        self._manifests: dict[int, list[Part]] = {}  # of stored versions and of those being fetched
        self._changed = asyncio.Condition()
        self._stored: dict[int, set[Chunk]] = {}
        self._removed: set[int] = set()
        self._loading: Counter[int] = Counter()  # replicas that load a version
        self._deliveries: dict[int, Delivery] = {}  # by the replica's rank

    async def folder(self) -> str:
        return str(self._folder.path)

    async def expect(self, version: int) -> None:
        """Make room for a version that is about to be written; remove any older one of the same number."""
        self._make_room(version)
        self._remove(version)
        self._removed.discard(version)
        await self._notify()
        for delivery in self._deliveries.values():
            delivery.forget(version)

    async def close(self) -> None:
        """Cancel all fetches and remove the folder: the run ends."""
        for fetch in self._running:
            fetch.cancel()
        if self._running:
            await asyncio.wait(self._running)
        self._folder.close()

    async def tally(self) -> dict[str, int]:
        """Return :class:`~verl_rhyme.weights.transfer.Counts` of fetches since the last call, and ``far_bytes``, the
        bytes from other sites.
        """
        tally, self._tally = self._tally, Counter()
        return dict(tally)

    # ---- the actor's node ----

    async def written(self, version: int) -> str:
        """Publish a version that the actor has written, and return its identity.

        Raises:
            WeightsError: The version is incomplete.
        """
        parts = self._folder.parts(version)
        self._stored[version], self._manifests[version] = set(all_chunks(parts)), parts
        self._identities[version] = identity(parts)
        await self._notify()
        return self._identities[version]

    async def revive(self, version: int, wanted: str) -> bool:
        """Publish a version from a dead relay's folder; return whether it is intact."""
        if not await asyncio.to_thread(self._folder.revive, version, wanted):
            return False
        await self.written(version)
        return True

    # ---- between nodes ----

    async def parts(self, version: int) -> list[Part]:
        """Return the parts of a version, once they are known here.

        Raises:
            WeightsError: The version was removed to make room.
        """
        await self._until(version, lambda: version in self._manifests)
        return self._manifests[version]

    async def chunk(
        self, version: int, chunk: Chunk, base: Base | None = None, pack: bool = False, far: bool = False
    ) -> np.ndarray:
        """Return the coded chunk, uint8[M], once it is stored; ``far``: for another site. Raises like :meth:`parts`."""
        await self._until(version, lambda: chunk in self._stored.get(version, ()))
        parts = self._manifests[version]
        if far:
            self._far_requests |= dict.fromkeys((version, *(base or ())[:1]), asyncio.get_running_loop().time())
        return await asyncio.to_thread(self._sender.answer, version, chunk, parts, base, pack)

    async def fetch(self, version: int, wanted: str, sources: list[tuple[Any, bool]]) -> None:
        """Start to fetch a version, unless it is here or being fetched. Errors are raised by :meth:`deliver`.

        Args:
            version: Number of the version.
            wanted: Identity of the version; a version with the same number and another identity is not accepted.
            sources: Relays to try in order, each with whether it is at another site.
        """
        self._expect_identity(version, wanted)
        known = self._fetches.get(version)
        if version in self._folder.versions() or (known is not None and not known.done()):
            return
        fetch = asyncio.create_task(self._fetch_from(version, wanted, sources, list(self._running)))
        fetch.add_done_callback(lambda each: each.cancelled() or each.exception())  # no delivery may await it
        fetch.add_done_callback(self._running.discard)
        self._running.add(fetch)
        self._fetches[version] = fetch

    async def _fetch_from(
        self, version: int, wanted: str, sources: list[tuple[Any, bool]], before: list[asyncio.Task[None]]
    ) -> None:
        if before:  # the folder has room for one fetch at a time
            await asyncio.wait(before)
        for other in self._folder.unfinished():
            if other != version:
                self._folder.remove(other)
        self._make_room(version)
        self._removed.discard(version)
        await self._notify()
        if await self.revive(version, wanted):
            return
        receiver: Receiver | None = None
        for left, (relay, far) in zip(reversed(range(len(sources))), sources, strict=True):
            source = RaySource(relay, far)
            try:
                parts = await ask_parts(source, version, self._patience)
                if identity(parts) != wanted:
                    raise WeightsError(f"a source has other weights under version {version}")
                if receiver is None:
                    receiver = await self._receiver(version, parts)
                await self._receive(receiver, source, version, far)
                return
            except Exception as error:
                if not left or not isinstance(error, (RayError, LinkError, WeightsError)):
                    if self._fetches.get(version) is not asyncio.current_task():
                        raise  # another fetch of this version has started
                    self._manifests.pop(version, None)
                    self._stored.pop(version, None)  # the chunks stay in the folder for the next fetch
                    self._removed.add(version)
                    await self._notify()
                    raise
                logger.warning("fetching weights of version %d from another node: %s", version, last_line(error))

    async def _receiver(self, version: int, parts: list[Part]) -> Receiver:
        transfer = await begin(self._folder, version, parts)
        here = set(all_chunks(parts)) - set(transfer.missing)
        if here:
            logger.warning("weights of version %d: resuming the transfer, %d chunks are stored", version, len(here))
        self._stored[version], self._manifests[version] = here, parts
        await self._notify()

        async def kept(chunk: Chunk) -> None:
            self._stored[version].add(chunk)
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
                    "weights of version %d: %d of %d chunks came in full from another site instead of as a difference: "
                    "the source no longer has the previous version, or its layout differs",
                    *(version, came["whole"], came["chunks"]),
                )

    # ---- replicas ----

    async def deliver(self, replica: Target, version: int, patient: bool = False, wanted: str | None = None) -> None:
        """Have a replica of this node load a version, once it is here. Arguments and errors of :meth:`Delivery.take`.

        Args:
            wanted: Identity of the version; ``None`` if it is known here.
        """
        if wanted is not None:
            self._expect_identity(version, wanted)
        delivery = self._deliveries.setdefault(replica.rank, Delivery(self._held))
        await delivery.take(replica, version, patient)

    async def forget(self, rank: int) -> None:
        """Forget a replica that is about to rest: when it returns it loads a version in any case."""
        self._deliveries.pop(rank, None)

    # ---- internals ----

    @asynccontextmanager
    async def _held(self, version: int) -> AsyncIterator[None]:
        self._loading[version] += 1
        try:
            await self._wait_stored(version)
            yield
        finally:
            self._loading[version] -= 1

    async def _wait_stored(self, version: int) -> None:
        while version not in self._folder.versions():
            if (fetch := self._fetches.get(version)) is None:
                raise UnsentError(
                    f"weights of version {version} were not sent to this node; it has versions "
                    f"{self._folder.versions()}"
                )
            try:
                return await asyncio.shield(fetch)
            except RayActorError as error:  # a new relay may replace the source
                raise UnsentError(
                    f"weights of version {version} could not be fetched from another node: {last_line(error)}"
                ) from error
            except (RayError, LinkError) as error:
                raise WeightsError(
                    f"weights of version {version} could not be fetched from another node: {error}"
                ) from error
            except asyncio.CancelledError:
                if not fetch.cancelled():
                    raise  # else the version is written again

    def _expect_identity(self, version: int, wanted: str) -> None:
        """Remove a version, or stop its fetch, if its identity is not the wanted one."""
        known = self._identities.get(version)
        if known is None and version in self._folder.versions():
            known = identity(self._folder.parts(version))
        if known not in (None, wanted):
            self._remove(version)
            for delivery in self._deliveries.values():
                delivery.forget(version)
        self._identities[version] = wanted

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, version: int, here: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: here() or version in self._removed)
        if not here():
            raise WeightsError(f"weights of version {version} were removed to make room for newer ones")

    def _make_room(self, coming: int) -> None:
        """Remove old versions that no replica loads.

        The version that another site fetches is kept: without it a site slower than the training steps would never
        complete a version.
        """
        others = [version for version in self._folder.versions() if version != coming]
        old = others[: max(0, len(others) - KEPT + 1)]
        since = asyncio.get_running_loop().time() - self._patience.answer
        far = [version for version in old if self._far_requests.get(version, since) > since]
        for version in old:
            if not self._loading[version] and version not in far[-1:] and not self._folder.read_now(version):
                self._remove(version)

    def _remove(self, version: int) -> None:
        self._folder.remove(version)
        self._removed.add(version)
        if fetch := self._fetches.get(version):
            fetch.cancel()
        for known in (self._manifests, self._stored, self._fetches, self._far_requests, self._identities):
            known.pop(version, None)


def start(node: str, root: str | None, *options: Any) -> Any:
    """Start the relay of a Ray node with :class:`Relay`'s options; it ends with the process that starts it."""
    return (
        ray.remote(Relay)
        .options(
            num_cpus=0,
            max_concurrency=_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        )
        .remote(root, *options)
    )
