"""Weight versions as files of one node.

A version is a folder of safetensors files, its *parts*, and a manifest of them. The manifest is written last: a version
with a manifest is complete. Only the user who runs training may read the files.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from verl_rhyme.weights.transfer import Chunk, Part

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

_MANIFEST = "manifest.json"


class WeightsError(RuntimeError):
    """Weights are missing or damaged, or there is no room for them; the message says what to do."""


class UnsentError(WeightsError):
    """A version has not reached a node; a new fetch request may help."""


class Folder:
    """Weight versions in a folder of :func:`~verl_rhyme.weights.claims.claim`; each has one writer at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def versions(self) -> list[int]:
        """Return the complete versions, in order."""
        return sorted(int(folder.parent.name) for folder in self.path.glob(f"*/{_MANIFEST}"))

    def has(self, version: int) -> bool:
        """Return whether a version is complete."""
        return (self._of(version) / _MANIFEST).exists()

    def incomplete_versions(self) -> list[int]:
        return sorted({int(each.name) for each in self.path.iterdir() if each.is_dir()} - set(self.versions()))

    def parts(self, version: int) -> list[Part]:
        """Return the parts of a complete version. Raises WeightsError if it is missing."""
        with self._manifest(version) as manifest:
            return _parts(manifest.read())

    # ---- writing ----

    def write(self, version: int, number: int, at: int, *pieces: bytes | memoryview) -> None:
        """Write adjacent bytes of a part, from offset ``at`` on. Raises WeightsError if there is no room."""
        try:
            self._of(version).mkdir(mode=0o700, exist_ok=True)
            file = os.open(self._file(version, number), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                for piece in pieces:
                    left = memoryview(piece)
                    while left:
                        done = os.pwrite(file, left, at)
                        at, left = at + done, left[done:]
            finally:
                os.close(file)
        except OSError as error:
            raise WeightsError(
                f"weights of version {version} could not be written to {self.path} ({error.strerror}): the folder "
                "needs room for two versions of the model; start the container with a larger --shm-size, or set "
                "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.relay.folder to a folder with more room"
            ) from error

    def complete(self, version: int, parts: Iterable[Part]) -> None:
        manifest = self._of(version) / _MANIFEST
        partial = manifest.with_suffix(".partial")
        partial.write_text(json.dumps([asdict(part) for part in parts]))
        partial.rename(manifest)

    def remove(self, version: int) -> None:
        (self._of(version) / _MANIFEST).unlink(missing_ok=True)  # first: the version is incomplete from now on
        shutil.rmtree(self._of(version), ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        lock_of(self.path).unlink(missing_ok=True)

    # ---- reading ----

    def read_chunk(self, version: int, chunk: Chunk, part: Part) -> NDArray[np.uint8] | None:
        """Return the stored bytes of a chunk, uint8[N], unverified; ``None`` if they are incomplete."""
        begin, size = part.range(chunk.index)
        try:
            with self._file(version, chunk.part).open("rb") as file:
                data = os.pread(file.fileno(), size, begin)
        except FileNotFoundError:
            return None
        return np.frombuffer(data, np.uint8) if len(data) == size else None

    def read(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors, memory-mapped where possible. :meth:`is_read` is true until the last one.

        Raises WeightsError if the version is missing.
        """
        from safetensors import safe_open

        with self._manifest(version) as manifest:
            fcntl.flock(manifest, fcntl.LOCK_SH)  # until it is closed, or this process ends
            for number in range(len(_parts(manifest.read()))):  # their checksums were verified on arrival
                with safe_open(self._file(version, number), framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a dict
                        yield name, tensors.get_tensor(name)

    def is_read(self, version: int) -> bool:
        """Whether any process reads a version, also one unknown to this node's relay."""
        try:
            with self._manifest(version) as manifest:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (WeightsError, OSError):  # it is missing, or the file system has no such locks
            pass
        return False

    # ---- names ----

    def _manifest(self, version: int) -> IO[str]:
        try:
            return (self._of(version) / _MANIFEST).open()
        except FileNotFoundError:
            raise WeightsError(
                f"{self.path} has no weights of version {version}; it has versions {self.versions()}"
            ) from None

    def _of(self, version: int) -> Path:
        return self.path / str(version)

    def _file(self, version: int, number: int) -> Path:
        return self._of(version) / f"{number:05d}.safetensors"


def lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _parts(manifest: str) -> list[Part]:
    return [Part(part["bytes"], part["chunk_bytes"], tuple(part["digests"])) for part in json.loads(manifest)]
