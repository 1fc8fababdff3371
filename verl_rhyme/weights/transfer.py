"""State of a weight transfer: missing chunks, chunks in flight, and verified chunks.

A version consists of *parts* (files), a part of *chunks* (ranges of its bytes). The version's manifest arrives first
and has a checksum of each chunk. The receiver requests chunk by chunk; the sender is stateless. A broken link or a
restart therefore costs only the chunks in flight. Late, duplicate and reordered answers are harmless: only the
checksum decides whether an answer is accepted.

No clock, thread, file, verl, ray or torch here: :mod:`verl_rhyme.weights.receiving` drives it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

#: Bytes of a chunk.
CHUNK_BYTES = 16 << 20
#: Maximum chunks in flight: 128 MiB, which a link of 10 Gbit/s sends in 0.1 s.
WINDOW = 8
#: How often a chunk may arrive damaged.
TRIES = 8
#: Damaged arrivals of a chunk after which it is requested plain: its base may be damaged.
_PLAIN_AFTER = 2


@dataclass(frozen=True)
class Part:
    """One file: its size, the size of its chunks (the last may be shorter), and xxh3 of each chunk, in hexadecimal."""

    bytes: int
    chunk_bytes: int
    digests: tuple[str, ...]

    def range(self, index: int) -> tuple[int, int]:
        """Return the offset and the number of bytes of a chunk."""
        begin = index * self.chunk_bytes
        return begin, min(self.chunk_bytes, self.bytes - begin)


@dataclass(frozen=True, order=True)
class Chunk:
    """A chunk of a version: the number of its part, and its index in the part."""

    part: int
    index: int


@dataclass
class Counts:
    """Statistics of one transfer.

    Attributes:
        bytes: Coded bytes received.
        chunks: Chunks accepted.
        damaged: Answers whose checksum differed from the manifest.
        lost: Requests without an answer.
        found: Chunks kept from an interrupted transfer.
        whole: Accepted chunks that came in full though a difference from a base was requested.
    """

    bytes: int = 0
    chunks: int = 0
    damaged: int = 0
    lost: int = 0
    found: int = 0
    whole: int = 0


def digest(data: bytes | memoryview) -> str:
    """Return the 64-bit xxh3: it detects accidental damage, not an attack."""
    return xxhash.xxh3_64_hexdigest(data)


def identity(parts: Sequence[Part]) -> str:
    """Return a hash of a version's content: versions with equal files have equal identities, whatever their number."""
    manifest = "\n".join(f"{part.bytes} {part.chunk_bytes} {' '.join(part.digests)}" for part in parts)
    return xxhash.xxh3_128_hexdigest(manifest.encode())


class Transfer:
    """The receiver's state of one version.

    Args:
        parts: Parts in the version's manifest, whose :func:`identity` the caller has verified.
        window: Maximum chunks in flight. The window is halved when an answer is lost and grows by one with each
            accepted one, so that answers of a slow link arrive before they count as lost.
        tries: How often a chunk may arrive damaged.
    """

    def __init__(self, parts: Sequence[Part], window: int = WINDOW, tries: int = TRIES) -> None:
        self.parts = tuple(parts)
        self.counts = Counts()
        self._most, self._window, self._tries = window, window, tries
        self._missing = dict.fromkeys(all_chunks(self.parts))  # in order
        self._in_flight: set[Chunk] = set()
        self._damaged: dict[Chunk, int] = {}
        self._left = [len(part.digests) for part in self.parts]
        self._sealed: set[int] = set()

    @property
    def missing(self) -> list[Chunk]:
        """Missing chunks, in the order of requests."""
        return list(self._missing)

    @property
    def done(self) -> bool:
        """Whether all parts are stored and verified."""
        return len(self._sealed) == len(self.parts)

    def found(self, chunk: Chunk) -> None:
        """Mark a stored chunk that :meth:`fits` as received, from before this transfer."""
        self._keep(chunk)
        self.counts.found += 1

    def asks(self) -> list[Chunk]:
        """Return the chunks to request now and mark them as in flight."""
        now = []
        for chunk in self._missing:
            if len(self._in_flight) >= self._window:
                break
            if chunk not in self._in_flight:
                self._in_flight.add(chunk)
                now.append(chunk)
        return now

    def plain(self, chunk: Chunk) -> bool:
        """Whether to request a chunk plain: neither compressed nor against a base."""
        return self._damaged.get(chunk, 0) >= _PLAIN_AFTER

    def fits(self, chunk: Chunk, data: bytes | memoryview) -> bool:
        """Whether these bytes have the chunk's size and checksum. Changes nothing; callable from any thread."""
        part = self.parts[chunk.part]
        return len(data) == part.range(chunk.index)[1] and digest(data) == part.digests[chunk.index]

    def kept(self, chunk: Chunk, came: int) -> bool:
        """Mark a chunk that :meth:`fits` as stored.

        Args:
            chunk: Stored chunk.
            came: Coded bytes of the answer.

        Returns:
            Whether it was missing: a chunk may arrive twice.
        """
        self._in_flight.discard(chunk)
        self.counts.bytes += came
        self._window = min(self._most, self._window + 1)
        if chunk not in self._missing:
            return False
        self._keep(chunk)
        self.counts.chunks += 1
        return True

    def damaged(self, chunk: Chunk, came: int) -> bool:
        """Note that an answer did not fit.

        Returns:
            Whether the chunk is requested again; false after too many damaged answers.
        """
        self._in_flight.discard(chunk)
        self.counts.bytes += came
        self.counts.damaged += 1
        self._damaged[chunk] = self._damaged.get(chunk, 0) + 1
        return chunk not in self._missing or self._damaged[chunk] < self._tries

    def lost(self, chunk: Chunk) -> None:
        """Note that a request had no answer: it is repeated, and the window is halved."""
        self._in_flight.discard(chunk)
        self.counts.lost += 1
        self._window = max(1, self._window // 2)

    def cut(self) -> None:
        """Note that no request is in flight any more."""
        self._in_flight.clear()

    def whole(self) -> list[int]:
        """Return the parts whose chunks are all stored, but not yet verified in their files."""
        return [part for part, left in enumerate(self._left) if not left and part not in self._sealed]

    def reread(self, part: int, wrong: Sequence[int]) -> bool:
        """Note the result of verifying a part in its file.

        Args:
            part: Part of :meth:`whole`.
            wrong: Damaged chunks, which are missing from now on; empty if the part is intact.

        Returns:
            Whether the damaged chunks are requested again; false after too many damaged ones.
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
