"""The receiver of a transfer: it connects ``transfer.Transfer`` with files and with a :class:`Source` of chunks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from verl_rhyme.weights.coding import DamagedError, decode, is_difference
from verl_rhyme.weights.folder import Folder, WeightsError
from verl_rhyme.weights.sending import Base, read_base
from verl_rhyme.weights.transfer import Chunk, Part, Transfer, identity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

#: Seconds before a lost chunk is requested again: at first, and at most; doubled after each failure.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0


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


@dataclass(frozen=True)
class Timeouts:
    answer: float = 60.0  # seconds until an answer counts as lost
    silence: float = 600.0  # seconds without any valid chunk until the receiver gives up on a source


async def start_transfer(folder: Folder, version: int, parts: list[Part]) -> Transfer:
    """Start a transfer of a version; verified chunks of an interrupted transfer are kept."""
    transfer = Transfer(parts)
    folder.remove_foreign_files(version, parts)
    for number, part in enumerate(parts):
        damaged = set(await asyncio.to_thread(folder.damaged_chunks, version, number, part))
        for index in set(range(len(part.digests))) - damaged:
            transfer.mark_stored(Chunk(number, index))
    return transfer


def newest_base(folder: Folder, version: int) -> Base | None:
    others = [other for other in folder.versions() if other != version]
    return Base(others[-1], identity(folder.parts(others[-1]))) if others else None


async def request_parts(source: Source, version: int, timeouts: Timeouts = Timeouts()) -> list[Part]:
    """Call :meth:`Source.parts` until it answers. Raises LinkError after ``timeouts.silence``."""
    pause, until = _PAUSE_S, time.monotonic() + timeouts.silence
    while True:
        try:
            return await asyncio.wait_for(source.parts(version), timeouts.silence)
        except (LinkError, asyncio.TimeoutError) as error:
            if time.monotonic() > until:
                raise LinkError(f"the source sends no manifest of weights of version {version}: {error}") from error
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


class Receiver:
    """Receiver of one version, from one source at a time; another source may continue the same ``transfer``.

    ``on_chunk`` is called for each stored chunk, which may now be passed on.
    """

    def __init__(
        self,
        folder: Folder,
        version: int,
        transfer: Transfer,
        on_chunk: Callable[[Chunk], Awaitable[None]],
        timeouts: Timeouts = Timeouts(),
    ) -> None:
        self.counts = transfer.counts
        self._folder, self._version, self._transfer = folder, version, transfer
        self._on_chunk, self._timeouts = on_chunk, timeouts
        self._heard, self._pause = time.monotonic(), _PAUSE_S
        self._base: Base | None = None
        self._base_parts: list[Part] = []
        self._writes: set[asyncio.Task[bool]] = set()

    async def fetch(self, source: Source, base: Base | None, pack: bool) -> None:
        """Fetch all chunks and complete the version; ``base`` is a result of :func:`newest_base`.

        If ``pack``, for a slow link, chunks are compressed, against the base if both sides have it. Raises LinkError if
        no chunk arrived for ``timeouts.silence``, WeightsError if there is no room or a chunk arrived damaged too
        often.
        """
        transfer = self._transfer
        self._heard, self._pause, self._base = time.monotonic(), _PAUSE_S, base
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
            coded = await asyncio.wait_for(request, self._timeouts.answer)
        except (LinkError, asyncio.TimeoutError) as error:
            if time.monotonic() - self._heard > self._timeouts.silence:
                raise LinkError(
                    f"no chunk of weights of version {version} arrived for {self._timeouts.silence:.0f} s"
                ) from error
            pause = self._pause
            await asyncio.sleep(pause)
            self._pause = max(self._pause, min(2 * pause, _LONGEST_PAUSE_S))  # once for chunks lost together
            transfer.lose(chunk)
            return
        write = asyncio.create_task(asyncio.to_thread(self._write, chunk, coded))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        if await asyncio.shield(write):
            self._heard, self._pause = time.monotonic(), _PAUSE_S
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
