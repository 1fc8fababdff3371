"""The end of a transfer that has the version: it answers what it is asked, and remembers nothing of who asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from verl_rhyme.weights.coding import encode
from verl_rhyme.weights.folder import Folder, WeightsError
from verl_rhyme.weights.transfer import Chunk, Part, identity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Base(NamedTuple):
    """A version that the receiver has whole."""

    version: int
    identity: str


class Sender:
    """Of one node; :meth:`chunk` may be called from several threads."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._known: dict[Base, list[Part]] = {}

    def answer(
        self, version: int, chunk: Chunk, parts: list[Part], base: Base | None = None, pack: bool = False
    ) -> NDArray[np.uint8]:
        """A chunk as :func:`~verl_rhyme.weights.coding.encode` makes it.

        Args:
            version: Which is here, at least that chunk.
            chunk: It.
            parts: The version's.
            base: What the asker has; it is used where the same is here.
            pack: Else it goes as it is.

        Raises:
            WeightsError: The chunk is not here.
        """
        part = parts[chunk.part]
        data = self._folder.chunk(version, chunk, part)
        if data is None:
            raise WeightsError(f"{chunk} of weights {version} is not here: they have made room for newer ones")
        old = self._base(base, chunk, part) if pack and base is not None else None
        return encode(data, old, pack)

    def _base(self, base: Base, chunk: Chunk, part: Part) -> NDArray[np.uint8] | None:
        """The same chunk of a version that is here and at the asker's, by its identity rather than its number."""
        if base not in self._known:
            try:
                parts = self._folder.parts(base.version)
            except WeightsError:
                return None
            self._known = {Base(base.version, identity(parts)): parts}  # of one: all ask with the same
        parts = self._known.get(base, [])
        return counterpart(self._folder, base.version, parts, chunk, part)


def counterpart(folder: Folder, version: int, parts: list[Part], chunk: Chunk, part: Part) -> NDArray[np.uint8] | None:
    """A chunk's in another version, where that has the same layout there."""
    if chunk.part >= len(parts):
        return None
    other = parts[chunk.part]
    same = (other.bytes, other.chunk_bytes) == (part.bytes, part.chunk_bytes)
    return folder.chunk(version, chunk, other) if same else None
