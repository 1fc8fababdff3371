"""The receiver of a transfer: it requests the chunks of a version from a :class:`Source` and stores them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from verl_rhyme.weights import PATIENCE_S
from verl_rhyme.weights.coding import DamagedError, decode
from verl_rhyme.weights.folder import Folder, WeightsError
from verl_rhyme.weights.sending import Base, read_base
from verl_rhyme.weights.transfer import Chunk, Part, all_chunks, digest, identity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

#: Seconds until an answer counts as lost, and before it is requested again.
ANSWER_S, _PAUSE_S = 60.0, 0.5
#: Chunks in flight: 128 MiB, which a link of 20 Mbit/s sends in that time, and one of 10 Gbit/s in 0.1 s.
_WINDOW = 8
#: How often a chunk may arrive damaged; after how often it is requested plain, since its base may be damaged.
_TRIES, _PLAIN_AFTER = 8, 2


class LinkError(Exception):
    """An answer was lost; the request may be repeated."""


class Source(Protocol):
    """The sender, as the receiver calls it."""

    async def parts(self, version: int) -> list[Part]:
        """Return the parts of a version, once the sender knows them. Raises LinkError; other errors are final."""
        ...

    async def chunk(self, version: int, chunk: Chunk, base: Base | None, pack: bool) -> NDArray[np.uint8]:
        """Return the coded chunk, uint8[M], once the sender has it. Raises like :meth:`parts`."""
        ...


def newest_base(folder: Folder, version: int) -> Base | None:
    others = [other for other in folder.versions() if other != version]
    return Base(others[-1], identity(folder.parts(others[-1]))) if others else None


async def request_parts(source: Source, version: int) -> list[Part]:
    """Call :meth:`Source.parts` until it answers. Raises LinkError after :data:`.PATIENCE_S`."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await asyncio.wait_for(source.parts(version), PATIENCE_S)
        except (LinkError, asyncio.TimeoutError) as error:
            if time.monotonic() > until:
                raise LinkError(f"the source sends no manifest of weights of version {version}: {error}") from error
        await asyncio.sleep(_PAUSE_S)


class Receiver:
    """Receiver of the ``parts`` of one version, from one source at a time; another source may continue.

    ``on_chunk`` is called for each stored chunk, which may now be passed on.
    """

    def __init__(
        self, folder: Folder, version: int, parts: list[Part], on_chunk: Callable[[Chunk], Awaitable[None]]
    ) -> None:
        #: ``bytes`` received (coded); ``damaged`` and ``lost`` answers.
        self.counts: Counter[str] = Counter()
        self._folder, self._version, self._parts = folder, version, parts
        self._on_chunk = on_chunk
        self._missing = dict.fromkeys(all_chunks(parts))  # in order
        self._damaged: Counter[Chunk] = Counter()
        self._heard = time.monotonic()
        self._base: Base | None = None
        self._base_parts: list[Part] = []

    async def fetch(self, source: Source, base: Base | None, pack: bool) -> None:
        """Fetch all chunks and complete the version; ``base`` is a result of :func:`newest_base`.

        If ``pack``, for a slow link, chunks are compressed, against the base if both sides have it. Raises LinkError if
        no chunk arrived for :data:`.PATIENCE_S`, WeightsError if there is no room or a chunk arrived damaged too often.
        """
        self._heard, self._base = time.monotonic(), base
        self._base_parts = [] if base is None else self._folder.parts(base.version)
        window = asyncio.Semaphore(_WINDOW)
        tasks = [asyncio.create_task(self._fetch(source, chunk, pack, window)) for chunk in self._missing]
        try:
            await asyncio.gather(*tasks)
        finally:  # no task may go on during the next attempt
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._folder.complete(self._version, self._parts)

    async def _fetch(self, source: Source, chunk: Chunk, pack: bool, window: asyncio.Semaphore) -> None:
        async with window:
            while not await self._request(source, chunk, pack and self._damaged[chunk] < _PLAIN_AFTER):
                pass
        del self._missing[chunk]
        await self._on_chunk(chunk)

    async def _request(self, source: Source, chunk: Chunk, pack: bool) -> bool:
        """Request a chunk and store the answer; return whether it came and was not damaged."""
        base, version = self._base if pack else None, self._version
        try:
            coded = await asyncio.wait_for(source.chunk(version, chunk, base, pack), ANSWER_S)
        except (LinkError, asyncio.TimeoutError) as error:
            if time.monotonic() - self._heard > PATIENCE_S:
                silence = f"no chunk of weights of version {version} arrived for {PATIENCE_S:.0f} s"
                raise LinkError(silence) from error
            self.counts["lost"] += 1
            await asyncio.sleep(_PAUSE_S)
            return False
        self.counts["bytes"] += len(coded)
        if await asyncio.to_thread(self._write, chunk, coded):
            self._heard = time.monotonic()
            return True
        problem = f"{chunk} of weights of version {version} arrived damaged"
        self.counts["damaged"] += 1
        self._damaged[chunk] += 1
        if self._damaged[chunk] >= _TRIES:
            raise WeightsError(f"{problem}, too many times")
        logger.warning("%s; fetching again", problem)
        return False

    def _write(self, chunk: Chunk, coded: NDArray[np.uint8]) -> bool:
        part, base = self._parts[chunk.part], self._base
        base_chunk = None if base is None else read_base(self._folder, base.version, self._base_parts, chunk, part)
        try:
            data = decode(coded, part.range(chunk.index)[1], base_chunk)
        except DamagedError as error:
            logger.warning("weights of version %d: %s", self._version, error)
            return False
        if digest(data.data) != part.digests[chunk.index]:
            return False
        self._folder.write(self._version, chunk.part, part.range(chunk.index)[0], data.data)
        return True
