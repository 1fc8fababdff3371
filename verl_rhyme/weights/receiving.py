"""The end of a transfer that fetches a version.

It drives :class:`~verl_rhyme.weights.transfer.Transfer` with files, and whatever carries questions and answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from verl_rhyme.weights.coding import DamagedError, decode, differs
from verl_rhyme.weights.folder import Folder, WeightsError
from verl_rhyme.weights.sending import Base, counterpart
from verl_rhyme.weights.transfer import WINDOW, Chunk, Part, Transfer, identity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

#: Seconds before what was lost is asked for again: the first time, and at most, doubled each time nothing came.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0


class LinkError(Exception):
    """An answer was lost on its way. It may be asked for again."""


class Source(Protocol):
    """The other end, through what carries questions and answers."""

    async def parts(self, version: int) -> list[Part]:
        """A version's, as soon as they are known there. Raises LinkError; all other errors are the end of it."""
        ...

    async def chunk(self, version: int, chunk: Chunk, base: Base | None, pack: bool) -> NDArray[np.uint8]:
        """uint8[M], coded, as soon as it is there. Raises as :meth:`parts`."""
        ...


@dataclass(frozen=True)
class Patience:
    """In seconds.

    Attributes:
        answer: Until an answer counts as lost.
        silence: Without any chunk that was kept, until a source is given up.
    """

    answer: float = 60.0
    silence: float = 600.0


async def begin(folder: Folder, version: int, parts: list[Part], window: int = WINDOW) -> Transfer:
    """What of a version is here already, from before its transfer was cut, is not sent again."""
    transfer = Transfer(parts, window)
    folder.trim(version, parts)
    for number, part in enumerate(parts):
        wrong = set(await asyncio.to_thread(folder.wrong, version, number, part))
        for index in set(range(len(part.digests))) - wrong:
            transfer.found(Chunk(number, index))
    return transfer


def base_of(folder: Folder, version: int) -> Base | None:
    """The newest other version that is whole here."""
    others = [other for other in folder.versions() if other != version]
    return Base(others[-1], identity(folder.parts(others[-1]))) if others else None


async def ask_parts(source: Source, version: int, patience: Patience = Patience()) -> list[Part]:
    """Raises LinkError after ``patience.silence``; else as :meth:`Source.parts`, which it asks again."""
    pause, until = _PAUSE_S, time.monotonic() + patience.silence
    while True:
        try:
            return await asyncio.wait_for(source.parts(version), patience.silence)
        except (LinkError, asyncio.TimeoutError) as error:
            if time.monotonic() > until:
                raise LinkError(f"weights {version} are not told of: {error}") from error
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


class Receiver:
    """Of one version, from one source; another may go on with the same transfer.

    Args:
        folder: Where it is written.
        version: Its number.
        transfer: Of :func:`begin`.
        kept: Called with each chunk that is here and can be passed on.
        patience: See there.
    """

    def __init__(
        self,
        folder: Folder,
        version: int,
        transfer: Transfer,
        kept: Callable[[Chunk], Awaitable[None]],
        patience: Patience = Patience(),
    ) -> None:
        self.counts = transfer.counts
        self._folder, self._version, self._transfer = folder, version, transfer
        self._kept, self._patience = kept, patience
        self._heard, self._pause = time.monotonic(), _PAUSE_S
        self._base: Base | None = None
        self._base_parts: list[Part] = []
        self._writes: set[asyncio.Task[bool]] = set()

    async def fetch(self, source: Source, base: Base | None, pack: bool) -> None:
        """Until all of it is here and was read again from where it lies; then the version is whole.

        Args:
            source: Whom to ask.
            base: Of :func:`base_of`.
            pack: The link is slow: chunks are packed, and against the base where both ends have it.

        Raises:
            LinkError: Nothing came for ``patience.silence``.
            WeightsError: There is no room, or chunks came damaged again and again.
        """
        transfer = self._transfer
        self._heard, self._pause, self._base = time.monotonic(), _PAUSE_S, base
        self._base_parts = [] if base is None else self._folder.parts(base.version)
        running: set[asyncio.Task[None]] = set()
        sealing: set[int] = set()
        try:
            while not transfer.done:
                running |= {asyncio.create_task(self._one(source, chunk, pack)) for chunk in transfer.asks()}
                new = set(transfer.whole()) - sealing
                sealing |= new
                running |= {asyncio.create_task(self._seal(part, sealing)) for part in new}
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if errors := [error for each in done if (error := each.exception()) is not None]:
                    raise errors[0]
        finally:  # none goes on beside another try
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            await asyncio.gather(*self._writes, return_exceptions=True)  # a thread cannot be stopped
            transfer.cut()
        self._folder.complete(self._version, transfer.parts)

    async def _one(self, source: Source, chunk: Chunk, pack: bool) -> None:
        transfer, version = self._transfer, self._version
        pack = pack and not transfer.plain(chunk)
        try:
            asked = source.chunk(version, chunk, self._base if pack else None, pack)
            coded = await asyncio.wait_for(asked, self._patience.answer)
        except (LinkError, asyncio.TimeoutError) as error:
            if time.monotonic() - self._heard > self._patience.silence:
                raise LinkError(f"no part of weights {version} came for {self._patience.silence:.0f} s") from error
            pause = self._pause
            await asyncio.sleep(pause)
            self._pause = max(self._pause, min(2 * pause, _LONGEST_PAUSE_S))  # once for all that were lost together
            transfer.lost(chunk)
            return
        write = asyncio.create_task(asyncio.to_thread(self._write, chunk, coded))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        if await asyncio.shield(write):
            self._heard, self._pause = time.monotonic(), _PAUSE_S
            if transfer.kept(chunk, len(coded)):
                self.counts.whole += pack and self._base is not None and not differs(coded)
                await self._kept(chunk)
            return
        self._again(transfer.damaged(chunk, len(coded)), f"{chunk} of weights {version} was damaged on its way")

    def _write(self, chunk: Chunk, coded: NDArray[np.uint8]) -> bool:
        """To its place, if it is right."""
        part, base = self._transfer.parts[chunk.part], self._base
        old = None if base is None else counterpart(self._folder, base.version, self._base_parts, chunk, part)
        try:
            data = decode(coded, part.range(chunk.index)[1], old)
        except DamagedError as error:
            logger.warning("weights %d: %s", self._version, error)
            return False
        if not self._transfer.fits(chunk, data.data):
            return False
        self._folder.put(self._version, chunk, part, data)
        return True

    async def _seal(self, number: int, sealing: set[int]) -> None:
        wrong = await asyncio.to_thread(self._folder.wrong, self._version, number, self._transfer.parts[number])
        sealing.discard(number)
        again = self._transfer.reread(number, wrong)
        if wrong:
            self._again(
                again, f"{len(wrong)} chunks of part {number} of weights {self._version} do not lie as they came"
            )

    def _again(self, again: bool, what: str) -> None:
        if not again:
            raise WeightsError(f"{what}, again and again")
        logger.warning("%s; it is fetched again", what)
