"""The receiver of a transfer: it connects ``transfer.Transfer`` with files and with a :class:`Source` of chunks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from verl_rhyme.weights.coding import DamagedError, decode, is_difference
from verl_rhyme.weights.folder import Folder, WeightsError
from verl_rhyme.weights.sending import Base, read_base
from verl_rhyme.weights.transfer import Chunk, Part, Transfer, identity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

#: Seconds until an answer counts as lost, and before it is requested again.
ANSWER_S, _PAUSE_S = 60.0, 0.5


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


async def request_parts(source: Source, version: int, silence: float = 600.0) -> list[Part]:
    """Call :meth:`Source.parts` until it answers. Raises LinkError after ``silence`` seconds."""
    until = time.monotonic() + silence
    while True:
        try:
            return await asyncio.wait_for(source.parts(version), silence)
        except (LinkError, asyncio.TimeoutError) as error:
            if time.monotonic() > until:
                raise LinkError(f"the source sends no manifest of weights of version {version}: {error}") from error
        await asyncio.sleep(_PAUSE_S)


class Receiver:
    """Receiver of the ``parts`` of one version, from one source at a time; another source may continue.

    ``on_chunk`` is called for each stored chunk, which may now be passed on. ``silence``: seconds without any valid
    chunk after which a source is given up.
    """

    def __init__(
        self,
        folder: Folder,
        version: int,
        parts: list[Part],
        on_chunk: Callable[[Chunk], Awaitable[None]],
        silence: float = 600.0,
    ) -> None:
        self._transfer = Transfer(parts)
        self.counts = self._transfer.counts
        self._folder, self._version = folder, version
        self._on_chunk, self._silence = on_chunk, silence
        self._heard = time.monotonic()
        self._base: Base | None = None
        self._base_parts: list[Part] = []
        self._writes: set[asyncio.Task[bool]] = set()

    async def fetch(self, source: Source, base: Base | None, pack: bool) -> None:
        """Fetch all chunks and complete the version; ``base`` is a result of :func:`newest_base`.

        If ``pack``, for a slow link, chunks are compressed, against the base if both sides have it. Raises LinkError if
        no chunk arrived for ``silence`` seconds, WeightsError if there is no room or a chunk arrived damaged too
        often.
        """
        transfer = self._transfer
        self._heard, self._base = time.monotonic(), base
        self._base_parts = [] if base is None else self._folder.parts(base.version)
        running: set[asyncio.Task[None]] = set()
        try:
            while not transfer.done:
                running |= {asyncio.create_task(self._fetch(source, each, pack)) for each in transfer.take_requests()}
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if errors := [error for each in done if (error := each.exception()) is not None]:
                    raise errors[0]
        finally:  # no task may go on during the next attempt
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await asyncio.gather(*self._writes, return_exceptions=True)  # a thread cannot be stopped
            transfer.forget_requests()
        self._folder.complete(self._version, transfer.parts)

    async def _fetch(self, source: Source, chunk: Chunk, pack: bool) -> None:
        transfer, version = self._transfer, self._version
        pack = pack and not transfer.needs_plain(chunk)
        try:
            request = source.chunk(version, chunk, self._base if pack else None, pack)
            coded = await asyncio.wait_for(request, ANSWER_S)
        except (LinkError, asyncio.TimeoutError) as error:
            if time.monotonic() - self._heard > self._silence:
                silence = f"no chunk of weights of version {version} arrived for {self._silence:.0f} s"
                raise LinkError(silence) from error
            await asyncio.sleep(_PAUSE_S)
            transfer.lose(chunk)
            return
        write = asyncio.create_task(asyncio.to_thread(self._write, chunk, coded))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        if await asyncio.shield(write):
            self._heard = time.monotonic()
            transfer.accept(chunk, len(coded))
            self.counts["full"] += pack and self._base is not None and not is_difference(coded)
            await self._on_chunk(chunk)
            return
        problem = f"{chunk} of weights of version {version} arrived damaged"
        if not transfer.reject(chunk, len(coded)):
            raise WeightsError(f"{problem}, too many times")
        logger.warning("%s; fetching again", problem)

    def _write(self, chunk: Chunk, coded: NDArray[np.uint8]) -> bool:
        part, base = self._transfer.parts[chunk.part], self._base
        base_chunk = None if base is None else read_base(self._folder, base.version, self._base_parts, chunk, part)
        try:
            data = decode(coded, part.range(chunk.index)[1], base_chunk)
        except DamagedError as error:
            logger.warning("weights of version %d: %s", self._version, error)
            return False
        if not self._transfer.fits(chunk, data.data):
            return False
        self._folder.write_chunk(self._version, chunk, part, data)
        return True
