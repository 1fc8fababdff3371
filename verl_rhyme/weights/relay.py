"""The relay of a node: an actor that keeps one copy of each weight version, which the node's replicas load.

Nodes pass a version on in a tree (:mod:`~verl_rhyme.weights.sites`), chunk by chunk: a node forwards chunks before it
has the whole version. :mod:`~verl_rhyme.weights.transfer` keeps the state of a transfer; here its requests and answers
are Ray calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_rhyme.observability.errors import last_line
from verl_rhyme.observability.log_handler import add_log_handler
from verl_rhyme.weights.claims import SHARED_MEMORY, claim
from verl_rhyme.weights.delivery import Delivery, Target
from verl_rhyme.weights.folder import UnsentError, WeightsError
from verl_rhyme.weights.receiving import ANSWER_S, LinkError, Receiver, newest_base, request_parts
from verl_rhyme.weights.samples import Sent
from verl_rhyme.weights.sending import Base, Sender
from verl_rhyme.weights.transfer import Chunk, Part, all_chunks

logger = logging.getLogger(__name__)

#: Versions that a node keeps: the newest, and the one before, which replicas may still load and which is a base.
KEPT = 2
#: Maximum concurrent calls: of nodes that wait for chunks, and of replicas that wait for a version.
_CALLS = 1024


class RaySource:
    """Another node's relay, for a receiver; ``remote``: at another site."""

    def __init__(self, relay: Any, remote: bool) -> None:
        self._relay, self._remote = relay, remote

    async def parts(self, version: int) -> list[Part]:
        return await _result(self._relay.parts.remote(version))

    async def chunk(self, version: int, chunk: Chunk, base: Base | None, pack: bool) -> np.ndarray:
        return await _result(self._relay.chunk.remote(version, chunk, base, pack, self._remote))


async def _result(call: Any) -> Any:
    try:
        return await call
    except (ActorUnavailableError, ObjectLostError) as error:  # a network error, which may pass
        raise LinkError(last_line(error)) from error


class _Version(NamedTuple):
    """Parts of a version that is stored or being fetched, and its stored chunks."""

    parts: list[Part]
    stored: set[Chunk]


class Relay:
    """The relay of a node; :func:`start` starts it as an actor.

    ``root`` is the parent of the weight folder (``None``: shared memory), ``heir_of`` the folder of the dead relay that
    this one replaces. If ``pack``, transfers between sites are compressed, against the previous version.
    """

    def __init__(self, root: str | None = None, heir_of: str | None = None, pack: bool = True) -> None:
        add_log_handler()
        self._folder = claim(SHARED_MEMORY if root is None else Path(root), heir_of)
        self._sender = Sender(self._folder)
        self._pack = pack
        self._tally: Counter[str] = Counter()
        self._remote_requests: dict[int, float] = {}  # when another site last requested a version, or it as base
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._versions: dict[int, _Version] = {}
        self._changed = asyncio.Condition()
        self._removed: set[int] = set()
        self._loading: Counter[int] = Counter()  # replicas that load a version
        self._deliveries: dict[int, Delivery] = {}  # by the replica's rank

    async def folder(self) -> str:
        return str(self._folder.path)

    async def close(self) -> None:
        fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)
        self._folder.close()

    async def take_tally(self) -> Counter[str]:
        """Return the counts of transfers since the last call, and ``remote_bytes``, the bytes from other sites."""
        tally, self._tally = self._tally, Counter()
        return tally

    # ---- the actor's node ----

    async def expect(self, version: int) -> str:
        """Make room for a version that the actor is about to write; return the folder."""
        self._make_room(version)
        return await self.folder()

    async def has(self, version: int) -> bool:
        """Return whether a version is complete here; if so, offer it to other nodes."""
        await self._notify()
        return self._folder.has(version)

    # ---- between nodes ----

    async def parts(self, version: int) -> list[Part]:
        """Return the parts of a version, once they are known here. Raises WeightsError if it was removed."""
        return (await self._known(version)).parts

    async def chunk(
        self, version: int, chunk: Chunk, base: Base | None = None, pack: bool = False, remote: bool = False
    ) -> np.ndarray:
        """Return the coded chunk, uint8[M], once it is stored; for another site if ``remote``. Raises WeightsError."""
        parts = (await self._known(version, chunk)).parts
        if remote:
            requested = [version] if base is None else [version, base.version]
            self._remote_requests |= dict.fromkeys(requested, asyncio.get_running_loop().time())
        return await asyncio.to_thread(self._sender.encode_chunk, version, chunk, parts, base, pack)

    async def fetch(self, version: int, sources: list[tuple[Any, bool]]) -> None:
        """Start to fetch a version, unless it is here or being fetched. Errors are raised by :meth:`deliver`.
        ``sources``: relays to try in order, and whether at another site.
        """
        running = self._fetches.get(version)
        if self._folder.has(version) or (running is not None and not running.done()):
            return
        self._removed.discard(version)
        fetch = asyncio.create_task(self._fetch(version, sources, list(self._fetches.values())))
        fetch.add_done_callback(lambda each: each.cancelled() or each.exception())  # no delivery may await it
        self._fetches[version] = fetch

    async def _fetch(self, version: int, sources: list[tuple[Any, bool]], before: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*before, return_exceptions=True)  # the folder has room for one fetch at a time
        for other in self._folder.incomplete_versions():
            self._folder.remove(other)
        self._make_room(version)
        receiver: Receiver | None = None
        try:
            for number, (relay, remote) in enumerate(sources, 1):
                source = RaySource(relay, remote)
                try:
                    if receiver is None:
                        receiver = await self._receiver(version, await request_parts(source, version))
                    return await self._receive(receiver, source, version, remote)
                except (RayError, LinkError, WeightsError) as error:
                    if number == len(sources):
                        raise
                    logger.warning("fetching weights of version %d from another node: %s", version, last_line(error))
        except Exception:
            self._versions.pop(version, None)
            self._removed.add(version)
            await self._notify()
            raise

    async def _receiver(self, version: int, parts: list[Part]) -> Receiver:
        stored: set[Chunk] = set()
        self._versions[version] = _Version(parts, stored)
        await self._notify()

        async def on_chunk(chunk: Chunk) -> None:
            stored.add(chunk)
            await self._notify()

        return Receiver(self._folder, version, parts, on_chunk)

    async def _receive(self, receiver: Receiver, source: RaySource, version: int, remote: bool) -> None:
        before = Counter(receiver.counts)
        try:
            await receiver.fetch(source, newest_base(self._folder, version), remote and self._pack)
        finally:
            new = receiver.counts - before
            self._tally += new
            self._tally["remote_bytes"] += new["bytes"] * remote

    # ---- replicas ----

    async def deliver(self, replica: Target, version: int, patient: bool = False, sent: Sent | None = None) -> None:
        """Have a replica of this node load a version, once it is here; as :meth:`Delivery.update`."""
        delivery = self._deliveries.setdefault(replica.rank, Delivery(self._hold))
        await delivery.update(replica, version, patient, sent)

    async def forget_replica(self, rank: int) -> None:
        """Forget a replica that is about to rest: when it returns it loads a version in any case."""
        self._deliveries.pop(rank, None)

    # ---- internals ----

    @asynccontextmanager
    async def _hold(self, version: int) -> AsyncIterator[None]:
        """Wait until a version is here, and keep it during the load."""
        self._loading[version] += 1
        try:
            if not self._folder.has(version):
                await self._wait_fetched(version)
            yield
        finally:
            self._loading[version] -= 1

    async def _wait_fetched(self, version: int) -> None:
        if (fetch := self._fetches.get(version)) is None:
            raise UnsentError(
                f"weights of version {version} were not sent to this node; it has versions {self._folder.versions()}"
            )
        problem = f"weights of version {version} could not be fetched from another node"
        try:
            await asyncio.shield(fetch)
        except RayActorError as error:  # a new relay may replace the source
            raise UnsentError(f"{problem}: {last_line(error)}") from error
        except (RayError, LinkError) as error:
            raise WeightsError(f"{problem}: {error}") from error

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _known(self, version: int, chunk: Chunk | None = None) -> _Version:
        """Wait until the parts of a version are known, and a chunk is stored. Raises WeightsError if it was removed."""

        def found() -> _Version | None:
            if version not in self._versions and self._folder.has(version):
                parts = self._folder.parts(version)
                self._versions[version] = _Version(parts, set(all_chunks(parts)))
            known = self._versions.get(version)
            return known if known is not None and (chunk is None or chunk in known.stored) else None

        async with self._changed:
            await self._changed.wait_for(lambda: found() is not None or version in self._removed)
        if (known := found()) is None:
            raise WeightsError(f"weights of version {version} were removed to make room for newer ones")
        return known

    def _make_room(self, coming: int) -> None:
        """Remove old versions that no replica loads. The newest one that another site fetches is kept: else a site
        slower than the training steps would never get a complete one.
        """
        others = [version for version in self._folder.versions() if version != coming]
        old = others[: max(0, len(others) - KEPT + 1)]
        since = asyncio.get_running_loop().time() - ANSWER_S
        remote = [version for version in old if self._remote_requests.get(version, since) > since]
        for version in old:
            if not self._loading[version] and version not in remote[-1:] and not self._folder.is_read(version):
                self._folder.remove(version)
                self._removed.add(version)
                for known in (self._versions, self._fetches, self._remote_requests):
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
