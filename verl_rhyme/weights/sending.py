"""The sender of a transfer: it answers requests for chunks and keeps no state of receivers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from verl_rhyme.weights.coding import encode
from verl_rhyme.weights.folder import Folder, WeightsError
from verl_rhyme.weights.transfer import Chunk, Part, identity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Base(NamedTuple):
    """A complete version of the receiver."""

    version: int
    identity: str


class Sender:
    """Sender of one node's weights; several threads may call :meth:`answer`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._known: dict[Base, list[Part]] = {}

    def answer(
        self, version: int, chunk: Chunk, parts: list[Part], base: Base | None = None, pack: bool = False
    ) -> NDArray[np.uint8]:
        """Return a chunk, coded by :func:`~verl_rhyme.weights.coding.encode`.

        Args:
            version: Version of the chunk.
            chunk: Chunk to send; it must be stored here, the rest of the version need not.
            parts: Parts of the version.
            base: Version of the receiver; used as base if the same version is stored here.
            pack: Whether to compress; else the bytes are sent plain.

        Raises:
            WeightsError: The chunk is missing.
        """
        part = parts[chunk.part]
        data = self._folder.chunk(version, chunk, part)
        if data is None:
            raise WeightsError(f"{chunk} of weights of version {version} was removed to make room for newer weights")
        base_chunk = self._base(base, chunk, part) if pack and base is not None else None
        return encode(data, base_chunk, pack)

    def _base(self, base: Base, chunk: Chunk, part: Part) -> NDArray[np.uint8] | None:
        """Return the chunk of the base version; ``None`` if the version here is missing or of another identity."""
        if base not in self._known:
            try:
                parts = self._folder.parts(base.version)
            except WeightsError:
                return None
            self._known = {Base(base.version, identity(parts)): parts}  # one suffices: all requests have the same base
        parts = self._known.get(base, [])
        return counterpart(self._folder, base.version, parts, chunk, part)


def counterpart(folder: Folder, version: int, parts: list[Part], chunk: Chunk, part: Part) -> NDArray[np.uint8] | None:
    """Return the same chunk of another version, or ``None`` if the part's layout differs."""
    if chunk.part >= len(parts):
        return None
    other = parts[chunk.part]
    same = (other.bytes, other.chunk_bytes) == (part.bytes, part.chunk_bytes)
    return folder.chunk(version, chunk, other) if same else None
