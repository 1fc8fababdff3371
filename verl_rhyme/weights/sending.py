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
    """Sender of one node's weights; several threads may call :meth:`encode_chunk`."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._bases: dict[Base, list[Part]] = {}

    def encode_chunk(
        self, version: int, chunk: Chunk, parts: list[Part], base: Base | None = None, pack: bool = False
    ) -> NDArray[np.uint8]:
        """Return a stored chunk as :func:`~verl_rhyme.weights.coding.encode` codes it. Raises WeightsError if it is
        missing. ``base``, a version of the receiver, is used if the same version is stored here.
        """
        part = parts[chunk.part]
        data = self._folder.read_chunk(version, chunk, part)
        if data is None:
            raise WeightsError(f"{chunk} of weights of version {version} was removed to make room for newer weights")
        base_chunk = None
        if pack and base is not None:
            base_chunk = read_base(self._folder, base.version, self._base_parts(base), chunk, part)
        return encode(data, base_chunk, pack)

    def _base_parts(self, base: Base) -> list[Part]:
        """Return the parts of the base version; empty if the version here is missing or of another identity."""
        if base not in self._bases:
            try:
                parts = self._folder.parts(base.version)
            except WeightsError:
                return []
            self._bases = {Base(base.version, identity(parts)): parts}  # one suffices: all requests have the same base
        return self._bases.get(base, [])


def read_base(folder: Folder, version: int, parts: list[Part], chunk: Chunk, part: Part) -> NDArray[np.uint8] | None:
    """Return the chunk of another version, of these ``parts``; ``None`` if its layout is not that of ``part``."""
    if chunk.part >= len(parts):
        return None
    other = parts[chunk.part]
    same = (other.bytes, other.chunk_bytes) == (part.bytes, part.chunk_bytes)
    return folder.read_chunk(version, chunk, other) if same else None
