"""Weight versions as files of one node.

A version is a folder of safetensors files, its *parts*, and a manifest of them. The manifest is written last: a version
with a manifest is complete. Only the user who runs training may read the files. A process can take over the folder of
a dead one; a version there is complete again only after all of it was verified.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from verl_rhyme.history.ownership import Owner, is_own_folder, lock
from verl_rhyme.weights.transfer import CHUNK_BYTES, Chunk, Part, digest, identity

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

#: Default location: memory, which all processes of a node share.
SHARED_MEMORY = Path("/dev/shm")
#: Maximum bytes of a part; a larger tensor has a part for itself.
PART_BYTES = 256 << 20

#: Parts written concurrently.
_WRITERS = 8

#: Seconds that a process may live on after Ray reports its death.
_DYING_S = 5.0

_PREFIX = "verl_rhyme_weights_"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")
_MANIFEST = "manifest.json"
#: Name of an unverified manifest in a folder that was taken over.
_LEFT = "manifest.left"


class WeightsError(RuntimeError):
    """Weights are missing or damaged, or there is no room for them; the message says what to do."""


class UnsentError(WeightsError):
    """A version has not reached a node; a new fetch request may help."""


class Folder:
    """Weight versions in one folder. Each version has one writer at a time.

    Args:
        path: Folder made by :func:`claim`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def versions(self) -> list[int]:
        """Return the complete versions, in order."""
        return sorted(int(folder.parent.name) for folder in self.path.glob(f"*/{_MANIFEST}"))

    def parts(self, version: int) -> list[Part]:
        """Return the parts of a complete version.

        Raises:
            WeightsError: The version is missing.
        """
        with self._manifest(version) as manifest:
            return _parts(manifest.read())

    def chunk(self, version: int, chunk: Chunk, part: Part) -> NDArray[np.uint8] | None:
        """Return the stored bytes of a chunk, uint8[N], unverified; ``None`` if they are incomplete."""
        begin, size = part.range(chunk.index)
        try:
            with self._file(version, chunk.part).open("rb") as file:
                data = os.pread(file.fileno(), size, begin)
        except FileNotFoundError:
            return None
        return np.frombuffer(data, np.uint8) if len(data) == size else None

    def writer(self, version: int, part_bytes: int = PART_BYTES, chunk_bytes: int = CHUNK_BYTES) -> Writer:
        """Remove a version and return a writer of its tensors."""
        self.remove(version)
        return Writer(self, version, part_bytes, chunk_bytes)

    def put(self, version: int, chunk: Chunk, part: Part, data: NDArray[np.uint8]) -> None:
        """Write a chunk, which the caller has verified.

        Raises:
            WeightsError: There is no room.
        """
        try:
            self._make(version)
            file = os.open(self._file(version, chunk.part), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                begin, left = part.range(chunk.index)[0], data.data
                while left:
                    done = os.pwrite(file, left, begin)
                    begin, left = begin + done, left[done:]
            finally:
                os.close(file)
        except OSError as error:
            raise self._write_error(version, error) from error

    def wrong(self, version: int, number: int, part: Part) -> list[int]:
        """Read a part and return its chunks that are missing or whose checksum differs."""
        wrong = []
        for index, wanted in enumerate(part.digests):
            data = self.chunk(version, Chunk(number, index), part)
            if data is None or digest(data.data) != wanted:
                wrong.append(index)
        return wrong

    def trim(self, version: int, parts: Sequence[Part]) -> None:
        """Remove files of an incomplete version that cannot belong to these parts."""
        for file in self._of(version).glob("*.safetensors"):
            number = int(file.stem)
            if number >= len(parts) or file.stat().st_size > parts[number].bytes:
                file.unlink()

    def revive(self, version: int, wanted: str) -> bool:
        """Verify a version of a dead owner and make it complete again; return whether it is intact and the wanted one.

        Args:
            version: Number of the version.
            wanted: Expected :func:`~verl_rhyme.weights.transfer.identity`.
        """
        left = self._of(version) / _LEFT
        if not left.exists() or identity(parts := _parts(left.read_text())) != wanted:
            return False
        if any(self.wrong(version, number, part) for number, part in enumerate(parts)):
            return False
        left.rename(left.with_name(_MANIFEST))
        return True

    def unfinished(self) -> list[int]:
        """Return the incomplete versions."""
        return sorted({int(each.name) for each in self.path.iterdir() if each.is_dir()} - set(self.versions()))

    def complete(self, version: int, parts: Iterable[Part]) -> None:
        """Write the manifest of a version: all its parts are stored."""
        manifest = self._of(version) / _MANIFEST
        unfinished = manifest.with_suffix(".partial")
        unfinished.write_text(json.dumps([asdict(part) for part in parts]))
        unfinished.rename(manifest)

    def read(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors, memory-mapped where possible. :meth:`read_now` is true until the last one.

        Raises:
            WeightsError: The version is missing, or a part is incomplete. After the last tensor: the version was
                written again during the read, and the tensors may be of both.
        """
        from safetensors import safe_open

        with self._manifest(version) as manifest:
            fcntl.flock(manifest, fcntl.LOCK_SH)  # until it is closed, or this process ends
            parts = _parts(manifest.read())
            for number, part in enumerate(parts):
                file = self._file(version, number)  # its checksums were verified on arrival
                if not file.exists() or file.stat().st_size != part.bytes:
                    raise WeightsError(f"{file} is incomplete: weights of version {version} cannot be loaded from it")
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a dict
                        yield name, tensors.get_tensor(name)
        if self.parts(version) != parts:
            raise WeightsError(
                f"weights of version {version} were written again during the load: the tensors may be of both writes"
            )

    def read_now(self, version: int) -> bool:
        """Whether any process reads a version, also one unknown to this node's relay."""
        try:
            with self._manifest(version) as manifest:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (WeightsError, OSError):  # it is missing, or the file system has no such locks
            pass
        return False

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        _lock_of(self.path).unlink(missing_ok=True)

    def remove(self, version: int) -> None:
        (self._of(version) / _MANIFEST).unlink(missing_ok=True)  # first: the version is incomplete from now on
        shutil.rmtree(self._of(version), ignore_errors=True)

    def _manifest(self, version: int) -> IO[str]:
        try:
            return (self._of(version) / _MANIFEST).open()
        except FileNotFoundError:
            raise WeightsError(
                f"{self.path} has no weights of version {version}; it has versions {self.versions()}"
            ) from None

    def _of(self, version: int) -> Path:
        return self.path / str(version)

    def _make(self, version: int) -> None:
        self._of(version).mkdir(mode=0o700, exist_ok=True)

    def _file(self, version: int, number: int) -> Path:
        return self._of(version) / f"{number:05d}.safetensors"

    def _write_error(self, version: int, error: OSError) -> WeightsError:
        return WeightsError(
            f"weights of version {version} could not be written to {self.path} ({error.strerror}): the folder needs "
            "room for two versions of the model; start the container with a larger --shm-size, or set "
            "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.relay.folder to a folder with more room"
        )


class Writer:
    """Writer of a version: collects tensors into parts and writes these in the background; ``close`` completes it.

    Each tensor is copied once, into a buffer that parts reuse, and written from there. A part holds tensors of one
    element size: safetensors has no padding for alignment.
    """

    def __init__(self, folder: Folder, version: int, part_bytes: int, chunk_bytes: int) -> None:
        self._folder, self._version = folder, version
        self._part_bytes, self._chunk_bytes = part_bytes, chunk_bytes
        self._open: dict[int, _Open] = {}  # by element size
        self._buffers: list[torch.Tensor] = []  # free ones
        self._parts: list[Future[Part]] = []
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="weights")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor to the CPU and add it to a part.

        Raises:
            WeightsError: There is no room.
        """
        size = tensor.element_size()
        part = self._open.get(size)
        if part is not None and part.bytes + tensor.nbytes > len(part.buffer):
            self._write(self._open.pop(size))
            part = None
        if part is None:
            part = self._open[size] = _Open(self._buffer(tensor))
        part.add(name, tensor)
        if part.bytes >= self._part_bytes:
            self._write(self._open.pop(size))

    def close(self) -> None:
        for size in list(self._open):
            self._write(self._open.pop(size))
        parts = [part.result() for part in self._parts]
        self._threads.shutdown()
        self._folder.complete(self._version, parts)

    def _buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return uint8[N] with room for a part and for the tensor; pinned if the tensor is on a GPU."""
        import torch

        if self._buffers and tensor.nbytes <= self._part_bytes:
            return self._buffers.pop()
        size = max(self._part_bytes, tensor.nbytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=tensor.device.type == "cuda")

    def _write(self, part: _Open) -> None:
        for written in self._parts[:-_WRITERS]:  # this bounds the buffers in memory and raises errors early
            written.result()
        self._parts.append(self._threads.submit(self._written, len(self._parts), part))

    def _written(self, number: int, part: _Open) -> Part:
        folder, header, data = self._folder, part.header(), part.buffer.numpy()[: part.bytes].data
        try:
            folder._make(self._version)
            with folder._file(self._version, number).open("wb", buffering=0) as file:
                for piece in (memoryview(header), data):
                    while piece:
                        piece = piece[file.write(piece) :]
        except OSError as error:
            raise folder._write_error(self._version, error) from error
        size, chunk = len(header) + part.bytes, self._chunk_bytes
        first = -len(header) % chunk  # bytes of data that fill up the header's last chunk
        head = header + data[:first]
        digests = [digest(head[at : at + chunk]) for at in range(0, len(head), chunk)]
        digests += [digest(data[at : at + chunk]) for at in range(first, part.bytes, chunk)]
        if len(part.buffer) == self._part_bytes:
            self._buffers.append(part.buffer)
        return Part(size, chunk, tuple(digests))


class _Open:
    """An unwritten part, in safetensors' format.

    Args:
        buffer: uint8[N] for the bytes of the tensors.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.bytes = buffer, 0
        self._tensors: dict[str, dict[str, Any]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        end = self.bytes + tensor.nbytes
        self.buffer[self.bytes : end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        about = {"dtype": _format_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [self.bytes, end]}
        self._tensors[name], self.bytes = about, end

    def header(self) -> bytes:
        header = json.dumps(self._tensors, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        return len(header).to_bytes(8, "little") + header


@cache
def _format_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype."""
    import torch
    from safetensors.torch import save

    saved = save({"tensor": torch.empty(0, dtype=dtype)})
    return str(json.loads(saved[8 : 8 + int.from_bytes(saved[:8], "little")])["tensor"]["dtype"])


def _parts(manifest: str) -> list[Part]:
    return [Part(part["bytes"], part["chunk_bytes"], tuple(part["digests"])) for part in json.loads(manifest)]


def claim(root: Path = SHARED_MEMORY, heir_of: str | None = None) -> Folder:
    """Make a folder owned by this process, and remove the folders of dead processes in the same place.

    Args:
        root: Parent folder.
        heir_of: Folder of a dead process to take over, if it still exists; its versions are incomplete until
            :meth:`Folder.revive`.

    Raises:
        WeightsError: The folder cannot be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        if heir_of is not None and _inherit(left := Path(heir_of)):
            return Folder(left)
        folder = root / f"{_PREFIX}{uuid.uuid4().hex}"
        while (held := lock(_lock_of(folder), create=True)) is None:
            time.sleep(0.001)  # another process's cleanup holds the lock briefly; it leaves unsigned locks alone
        Owner.here("").sign(held)  # this process holds the lock until it ends
        _remove_left_behind(root)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise WeightsError(
            f"cannot make a folder for weights in {root} ({error.strerror}): set "
            "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.relay.folder to another one"
        ) from error
    return Folder(folder)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _inherit(left: Path) -> bool:
    """Take over a folder whose owner is dead or dying; return whether it succeeded."""
    until = time.monotonic() + _DYING_S
    while is_own_folder(left) and time.monotonic() < until:
        if (held := _dead(left)) is not None:
            Owner.here("").sign(held)
            for manifest in left.glob(f"*/{_MANIFEST}"):
                manifest.rename(manifest.with_name(_LEFT))
            return True
        time.sleep(_DYING_S / 50)
    return False


def _dead(folder: Path) -> int | None:
    """Take the lock of a folder and return it if the owner is dead, else ``None``.

    The owner must have signed on this host: on another host the lock proves nothing.
    """
    try:
        held = lock(_lock_of(folder))
    except OSError:  # removed meanwhile, or another user's
        return None
    if held is not None and ((owner := Owner.of(_lock_of(folder))) is None or owner.is_foreign()):
        os.close(held)
        return None
    return held


def _remove_left_behind(root: Path) -> None:
    for folder in left_behind(root):
        try:
            if is_own_folder(folder):
                shutil.rmtree(folder)
            if not os.path.lexists(folder):
                _lock_of(folder).unlink()
        except OSError as error:  # the run can go on
            logger.warning("cannot remove %s, the weight folder of an ended run: %s", folder, error.strerror)


def left_behind(root: Path) -> Iterator[Path]:
    """Yield the folders made by :func:`claim` whose owner is dead, of this user on this host.

    Each folder's lock is held until the next iteration, so that no other process takes the folder over.
    """
    for file in root.glob(f"{_PREFIX}*.lock"):
        folder = file.with_suffix("")
        if _NAME.fullmatch(folder.name) and (held := _dead(folder)) is not None:
            try:
                yield folder
            finally:
                os.close(held)
