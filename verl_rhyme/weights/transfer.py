"""Parts and chunks of a version.

A version consists of *parts* (files), a part of *chunks* (ranges of its bytes). The version's manifest arrives first
and has a checksum of each chunk. The receiver requests chunk by chunk; the sender is stateless. A broken link therefore
costs only the chunks in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash

#: Bytes of a chunk.
CHUNK_BYTES = 16 << 20


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


def all_chunks(parts: Sequence[Part]) -> Iterator[Chunk]:
    for number, part in enumerate(parts):
        for index in range(len(part.digests)):
            yield Chunk(number, index)
