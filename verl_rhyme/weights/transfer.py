"""What of a version's weights is missing at a node, what to ask for next, and what is known to be right.

A version is *parts* (files), a part is *chunks*: ranges of its bytes, each with a checksum that the version's manifest
tells before any of them comes. The receiving end asks, chunk by chunk, the sending end only answers and remembers
nothing. So a link that is cut, an answer that is late, doubled or out of order, and an end that starts anew cost what
was under way; and an answer is kept for what it is, not for when it came or what it claims to be.

No clock, thread, file, verl, ray or torch here: :mod:`verl_rhyme.weights.receiving` drives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

#: Bytes of a chunk.
CHUNK_BYTES = 16 << 20
#: Chunks that are asked for at a time, at most: 128 MiB, what a link of 10 Gbit/s holds in 0.1 s.
WINDOW = 8
#: How often a chunk is asked for that comes damaged.
TRIES = 8
#: After so many of these it is asked for as it is: the base may be what is damaged.
_PLAIN_AFTER = 2


@dataclass(frozen=True)
class Part:
    """One file: its size, that of its chunks but for a shorter last one, and xxh3 of each chunk, in hexadecimal."""

    bytes: int
    chunk_bytes: int
    digests: tuple[str, ...]

    def range(self, index: int) -> tuple[int, int]:
        """First byte of a chunk, and how many it has."""
        begin = index * self.chunk_bytes
        return begin, min(self.chunk_bytes, self.bytes - begin)


@dataclass(frozen=True, order=True)
class Chunk:
    """Of a version: the number of its part, and its own there."""

    part: int
    index: int


@dataclass
class Counts:
    """Of one transfer.

    Attributes:
        bytes: That were sent for it and came, as they were coded.
        chunks: That were kept.
        damaged: Answers that were not what the manifest tells.
        lost: Asked for without an answer.
        found: Chunks that were here from before it was cut, and were not sent again.
        whole: Chunks that were kept and came as all their bytes, though what differs from a version here was asked for.
    """

    bytes: int = 0
    chunks: int = 0
    damaged: int = 0
    lost: int = 0
    found: int = 0
    whole: int = 0


def digest(data: bytes | memoryview) -> str:
    """xxh3 of 64 bits: it finds what happens by chance, not what somebody contrives."""
    return xxhash.xxh3_64_hexdigest(data)


def identity(parts: Sequence[Part]) -> str:
    """The same for versions whose files are equal byte by byte, whatever their numbers; else another."""
    told = "\n".join(f"{part.bytes} {part.chunk_bytes} {' '.join(part.digests)}" for part in parts)
    return xxhash.xxh3_128_hexdigest(told.encode())


class Transfer:
    """The receiving end of one version.

    Args:
        parts: As the version's manifest tells, which was checked by :func:`identity`.
        window: Chunks under way at a time, at most. It is halved when an answer is lost and grows by one with each
            that is kept, so that a slow link is not given more than it sends before answers count as lost.
        tries: How often a chunk may come damaged.
    """

    def __init__(self, parts: Sequence[Part], window: int = WINDOW, tries: int = TRIES) -> None:
        self.parts = tuple(parts)
        self.counts = Counts()
        self._most, self._window, self._tries = window, window, tries
        self._missing = dict.fromkeys(all_chunks(self.parts))  # in order
        self._asked: set[Chunk] = set()
        self._damaged: dict[Chunk, int] = {}
        self._left = [len(part.digests) for part in self.parts]
        self._sealed: set[int] = set()

    @property
    def missing(self) -> list[Chunk]:
        """In the order in which they are asked for."""
        return list(self._missing)

    @property
    def done(self) -> bool:
        """Everything is here and was checked where it lies."""
        return len(self._sealed) == len(self.parts)

    def found(self, chunk: Chunk) -> None:
        """It lies here from before, and :meth:`fits`."""
        self._keep(chunk)
        self.counts.found += 1

    def asks(self) -> list[Chunk]:
        """What to ask for now; it is under way from now on."""
        now = []
        for chunk in self._missing:
            if len(self._asked) >= self._window:
                break
            if chunk not in self._asked:
                self._asked.add(chunk)
                now.append(chunk)
        return now

    def plain(self, chunk: Chunk) -> bool:
        """Ask for it as it is, not packed and not against another version."""
        return self._damaged.get(chunk, 0) >= _PLAIN_AFTER

    def fits(self, chunk: Chunk, data: bytes | memoryview) -> bool:
        """Whether these bytes are that chunk; changes nothing, and may be called from any thread."""
        part = self.parts[chunk.part]
        return len(data) == part.range(chunk.index)[1] and digest(data) == part.digests[chunk.index]

    def kept(self, chunk: Chunk, came: int) -> bool:
        """An answer that :meth:`fits` was written to its place.

        Args:
            chunk: It.
            came: Bytes of the answer, coded.

        Returns:
            Whether it was missing: the same may come twice.
        """
        self._asked.discard(chunk)
        self.counts.bytes += came
        self._window = min(self._most, self._window + 1)
        if chunk not in self._missing:
            return False
        self._keep(chunk)
        self.counts.chunks += 1
        return True

    def damaged(self, chunk: Chunk, came: int) -> bool:
        """An answer did not fit.

        Returns:
            Whether it is asked for again: else it came damaged too often.
        """
        self._asked.discard(chunk)
        self.counts.bytes += came
        self.counts.damaged += 1
        self._damaged[chunk] = self._damaged.get(chunk, 0) + 1
        return chunk not in self._missing or self._damaged[chunk] < self._tries

    def lost(self, chunk: Chunk) -> None:
        """No answer came: the link is cut, or the other end is gone. It is asked for again."""
        self._asked.discard(chunk)
        self.counts.lost += 1
        self._window = max(1, self._window // 2)

    def cut(self) -> None:
        """Nothing is under way any more: whoever asked has stopped."""
        self._asked.clear()

    def whole(self) -> list[int]:
        """Parts whose chunks are all here, which are to be read once more from where they lie."""
        return [part for part, left in enumerate(self._left) if not left and part not in self._sealed]

    def reread(self, part: int, wrong: Sequence[int]) -> bool:
        """What reading a part again found.

        Args:
            part: Of :meth:`whole`.
            wrong: Chunks that do not fit where they lie, which are missing from now on; none: the part is right.

        Returns:
            Whether they are asked for again: else that happened too often.
        """
        if not wrong:
            self._sealed.add(part)
            return True
        may = True
        for index in wrong:
            chunk = Chunk(part, index)
            self._missing[chunk] = None
            self._left[part] += 1
            may &= self.damaged(chunk, 0)
        return may

    def _keep(self, chunk: Chunk) -> None:
        if chunk in self._missing:
            del self._missing[chunk]
            self._left[chunk.part] -= 1


def all_chunks(parts: Sequence[Part]) -> Iterator[Chunk]:
    for number, part in enumerate(parts):
        for index in range(len(part.digests)):
            yield Chunk(number, index)
