"""State of a weight transfer: missing chunks and chunks in flight.

A version consists of *parts* (files), a part of *chunks* (ranges of its bytes). The version's manifest arrives first
and has a checksum of each chunk. The receiver requests chunk by chunk; the sender is stateless. A broken link
therefore costs only the chunks in flight.

No clock, thread, file, verl, ray or torch here: :mod:`verl_rhyme.weights.receiving` drives it.
"""

from __future__ import annotations

from collections import Counter
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


def digest(data: bytes | memoryview) -> str:
    """Return the 64-bit xxh3: it detects accidental damage, not an attack."""
    return xxhash.xxh3_64_hexdigest(data)


def identity(parts: Sequence[Part]) -> str:
    """Return a hash of a version's content: versions with equal files have equal identities, whatever their number."""
    manifest = "\n".join(f"{part.bytes} {part.chunk_bytes} {' '.join(part.digests)}" for part in parts)
    return xxhash.xxh3_128_hexdigest(manifest.encode())


class Transfer:
    """The receiver's state of one version.

    At most ``window`` chunks are in flight. The window is halved when an answer is lost and grows by one with each
    accepted one, so that answers of a slow link arrive before they count as lost. A chunk may arrive damaged ``tries``
    times.
    """

    def __init__(self, parts: Sequence[Part], window: int = WINDOW, tries: int = TRIES) -> None:
        self.parts = list(parts)
        #: ``bytes`` received (coded), ``chunks`` accepted, and of these those that came ``full`` though a difference
        #: from a base was requested; ``damaged`` and ``lost`` answers.
        self.counts: Counter[str] = Counter()
        self._most, self._window, self._tries = window, window, tries
        self._missing = dict.fromkeys(all_chunks(self.parts))  # in order
        self._in_flight: set[Chunk] = set()
        self._damaged: Counter[Chunk] = Counter()

    @property
    def missing(self) -> list[Chunk]:
        return list(self._missing)

    @property
    def done(self) -> bool:
        return not self._missing

    def take_requests(self) -> list[Chunk]:
        """Return the chunks to request now; they are in flight from now on."""
        now = []
        for chunk in self._missing:
            if len(self._in_flight) >= self._window:
                break
            if chunk not in self._in_flight:
                self._in_flight.add(chunk)
                now.append(chunk)
        return now

    def needs_plain(self, chunk: Chunk) -> bool:
        """Whether to request a chunk plain: neither compressed nor against a base."""
        return self._damaged[chunk] >= _PLAIN_AFTER

    def fits(self, chunk: Chunk, data: bytes | memoryview) -> bool:
        """Whether these bytes have the chunk's checksum. Changes nothing; callable from any thread."""
        return digest(data) == self.parts[chunk.part].digests[chunk.index]

    def accept(self, chunk: Chunk, size: int) -> None:
        """Note that an answer of ``size`` coded bytes :meth:`fits` and is stored."""
        self._in_flight.discard(chunk)
        del self._missing[chunk]
        self._window = min(self._most, self._window + 1)
        self.counts.update(bytes=size, chunks=1)

    def reject(self, chunk: Chunk, size: int) -> bool:
        """Note that an answer did not fit; return whether the chunk is requested again: not after too many."""
        self._in_flight.discard(chunk)
        self._damaged[chunk] += 1
        self.counts.update(bytes=size, damaged=1)
        return self._damaged[chunk] < self._tries

    def lose(self, chunk: Chunk) -> None:
        """Note that a request had no answer: it is repeated, and the window is halved."""
        self._in_flight.discard(chunk)
        self._window = max(1, self._window // 2)
        self.counts.update(lost=1)

    def forget_requests(self) -> None:
        self._in_flight.clear()


def all_chunks(parts: Sequence[Part]) -> Iterator[Chunk]:
    for number, part in enumerate(parts):
        for index in range(len(part.digests)):
            yield Chunk(number, index)
