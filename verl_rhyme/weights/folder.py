"""Versions of a policy's weights in the files of one node.

A version is a folder of safetensors files, its parts, and a manifest that names them. The manifest comes last: what has
one is whole. Only the user who runs training may read them. What a process that died has left can be taken over; it is
not whole then before all of it was read again.
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

from verl_rhyme.history.ownership import Owner, is_ours, lock
from verl_rhyme.weights.transfer import CHUNK_BYTES, Chunk, Part, digest, identity

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

#: Where none is named: memory, which all processes of a node share.
SHARED_MEMORY = Path("/dev/shm")
#: Bytes of a part, at least where there is more than one.
PART_BYTES = 256 << 20

#: Parts that are written at a time.
_WRITERS = 8

#: Seconds that a process takes to end after Ray says that it has.
_DYING_S = 5.0

_PREFIX = "verl_rhyme_weights_"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")
_MANIFEST = "manifest.json"
#: The manifest in a folder that was taken over.
_LEFT = "manifest.left"


class WeightsError(RuntimeError):
    """Weights are missing, damaged, or find no room; the message says how to mend it."""


class UnsentError(WeightsError):
    """A version has not come to a node, which may be told again to fetch it."""


class Folder:
    """See the module. Of each version there is one writer at a time.

    Args:
        path: Made by :func:`claim`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def versions(self) -> list[int]:
        """Those that are whole, in order."""
        return sorted(int(folder.parent.name) for folder in self.path.glob(f"*/{_MANIFEST}"))

    def parts(self, version: int) -> list[Part]:
        """Of a version that is whole.

        Raises:
            WeightsError: It is not here.
        """
        with self._manifest(version) as manifest:
            return _parts(manifest.read())

    def chunk(self, version: int, chunk: Chunk, part: Part) -> NDArray[np.uint8] | None:
        """uint8[N] of a chunk as it lies there, right or not, or ``None``: it does not lie there in full."""
        begin, size = part.range(chunk.index)
        try:
            with self._file(version, chunk.part).open("rb") as file:
                data = os.pread(file.fileno(), size, begin)
        except FileNotFoundError:
            return None
        return np.frombuffer(data, np.uint8) if len(data) == size else None

    def writer(self, version: int, part_bytes: int = PART_BYTES, chunk_bytes: int = CHUNK_BYTES) -> Writer:
        """For tensors."""
        self.remove(version)
        return Writer(self, version, part_bytes, chunk_bytes)

    def put(self, version: int, chunk: Chunk, part: Part, data: NDArray[np.uint8]) -> None:
        """A chunk to its place; the caller knows that it is right.

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
            raise self._no_room(version, error) from error

    def wrong(self, version: int, number: int, part: Part) -> list[int]:
        """Chunks of a part that are not what the manifest tells, or are missing, by reading all of it."""
        wrong = []
        for index, told in enumerate(part.digests):
            data = self.chunk(version, Chunk(number, index), part)
            if data is None or digest(data.data) != told:
                wrong.append(index)
        return wrong

    def trim(self, version: int, parts: Sequence[Part]) -> None:
        """What lies there of a version that is fetched anew, but cannot be of these parts, goes."""
        for file in self._of(version).glob("*.safetensors"):
            number = int(file.stem)
            if number >= len(parts) or file.stat().st_size > parts[number].bytes:
                file.unlink()

    def revive(self, version: int, wanted: str) -> bool:
        """A version that was whole when its owner died is whole again, if it is the wanted one and all of it is right.

        Args:
            version: Its number.
            wanted: Its :func:`~verl_rhyme.weights.transfer.identity`.
        """
        left = self._of(version) / _LEFT
        if not left.exists() or identity(parts := _parts(left.read_text())) != wanted:
            return False
        if any(self.wrong(version, number, part) for number, part in enumerate(parts)):
            return False
        left.rename(left.with_name(_MANIFEST))
        return True

    def unfinished(self) -> list[int]:
        """Versions of which something is here, but not all."""
        return sorted({int(each.name) for each in self.path.iterdir() if each.is_dir()} - set(self.versions()))

    def complete(self, version: int, parts: Iterable[Part]) -> None:
        """All parts are here."""
        manifest = self._of(version) / _MANIFEST
        unfinished = manifest.with_suffix(".partial")
        unfinished.write_text(json.dumps([asdict(part) for part in parts]))
        unfinished.rename(manifest)

    def read(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, mapped rather than copied where that can be done. Until the last, :meth:`read_now`.

        Raises:
            WeightsError: The version is not here, or a part is not whole; behind the last tensor: the version was
                written anew meanwhile, and what was read may be of both.
        """
        from safetensors import safe_open

        with self._manifest(version) as manifest:
            fcntl.flock(manifest, fcntl.LOCK_SH)  # until it is closed, or this process ends
            parts = _parts(manifest.read())
            for number, part in enumerate(parts):
                file = self._file(version, number)  # its bytes were checked when it came
                if not file.exists() or file.stat().st_size != part.bytes:
                    raise WeightsError(f"{file} is not whole: weights {version} cannot be served from it")
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - not a dict
                        yield name, tensors.get_tensor(name)
        if self.parts(version) != parts:
            raise WeightsError(f"weights {version} were written anew while they were read: they may be of both")

    def read_now(self, version: int) -> bool:
        """Whether a process reads a version, also one that this node's relay did not send."""
        try:
            with self._manifest(version) as manifest:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (WeightsError, OSError):  # it is not here, or the file system has no such locks
            pass
        return False

    def close(self) -> None:
        """All of it goes."""
        shutil.rmtree(self.path, ignore_errors=True)
        _lock_of(self.path).unlink(missing_ok=True)

    def remove(self, version: int) -> None:
        (self._of(version) / _MANIFEST).unlink(missing_ok=True)  # first: it is not whole from now on
        shutil.rmtree(self._of(version), ignore_errors=True)

    def _manifest(self, version: int) -> IO[str]:
        try:
            return (self._of(version) / _MANIFEST).open()
        except FileNotFoundError:
            raise WeightsError(f"{self.path} has no weights of version {version}, only of {self.versions()}") from None

    def _of(self, version: int) -> Path:
        return self.path / str(version)

    def _make(self, version: int) -> None:
        self._of(version).mkdir(mode=0o700, exist_ok=True)

    def _file(self, version: int, number: int) -> Path:
        return self._of(version) / f"{number:05d}.safetensors"

    def _no_room(self, version: int, error: OSError) -> WeightsError:
        return WeightsError(
            f"weights {version} could not be written to {self.path} ({error.strerror}): it takes two versions of the "
            "model; give the container a larger --shm-size, or name a folder with more room "
            "(actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.relay.folder)"
        )


class Writer:
    """Tensors into parts, which are written while further tensors come; ``close`` makes the version whole.

    A tensor is copied once, into memory that parts share one after another, and from there to its file. Those of an
    element size go together: safetensors leaves no gaps to align them.
    """

    def __init__(self, folder: Folder, version: int, part_bytes: int, chunk_bytes: int) -> None:
        self._folder, self._version = folder, version
        self._part_bytes, self._chunk_bytes = part_bytes, chunk_bytes
        self._open: dict[int, _Open] = {}  # by element size
        self._buffers: list[torch.Tensor] = []  # that nothing is in
        self._parts: list[Future[Part]] = []
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="weights")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copies it, to the CPU.

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
        """uint8[N], N at least a part's bytes and the tensor's; pinned where that is a GPU's."""
        import torch

        if self._buffers and tensor.nbytes <= self._part_bytes:
            return self._buffers.pop()
        size = max(self._part_bytes, tensor.nbytes)
        return torch.empty(size, dtype=torch.uint8, pin_memory=tensor.device.type == "cuda")

    def _write(self, part: _Open) -> None:
        for written in self._parts[:-_WRITERS]:  # those in memory are few, and what failed is told early
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
            raise folder._no_room(self._version, error) from error
        size, chunk = len(header) + part.bytes, self._chunk_bytes
        first = -len(header) % chunk  # with so many bytes the header fills whole chunks
        head = header + data[:first]
        digests = [digest(head[at : at + chunk]) for at in range(0, len(head), chunk)]
        digests += [digest(data[at : at + chunk]) for at in range(first, part.bytes, chunk)]
        if len(part.buffer) == self._part_bytes:
            self._buffers.append(part.buffer)
        return Part(size, chunk, tuple(digests))


class _Open:
    """A part that tensors are added to, in safetensors' format.

    Args:
        buffer: uint8[N], for their bytes.
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
        told = json.dumps(self._tensors, separators=(",", ":")).encode()
        told += b" " * (-len(told) % 8)
        return len(told).to_bytes(8, "little") + told


@cache
def _format_name(dtype: torch.dtype) -> str:
    """safetensors' name of a type."""
    import torch
    from safetensors.torch import save

    saved = save({"tensor": torch.empty(0, dtype=dtype)})
    return str(json.loads(saved[8 : 8 + int.from_bytes(saved[:8], "little")])["tensor"]["dtype"])


def _parts(manifest: str) -> list[Part]:
    return [Part(part["bytes"], part["chunk_bytes"], tuple(part["digests"])) for part in json.loads(manifest)]


def claim(root: Path = SHARED_MEMORY, heir_of: str | None = None) -> Folder:
    """A folder of this process's own; what processes that are dead have left is removed here.

    Args:
        root: Where it is made.
        heir_of: The folder of a process that died, which is taken over if it is still there; its versions are not whole
            before :meth:`Folder.revive`.

    Raises:
        WeightsError: It cannot be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        if heir_of is not None and _inherit(left := Path(heir_of)):
            return Folder(left)
        folder = root / f"{_PREFIX}{uuid.uuid4().hex}"
        while (held := lock(_lock_of(folder), create=True)) is None:
            time.sleep(0.001)  # who looks for left-overs has it for a moment: it is not signed, and stays
        Owner.here("").sign(held)  # and it is held until this process ends
        _remove_remains(root)
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise WeightsError(
            f"no folder for weights in {root} ({error.strerror}): name another "
            "(actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.relay.folder)"
        ) from error
    return Folder(folder)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _inherit(left: Path) -> bool:
    """Take over a folder whose owner died, or is about to; whether it is there."""
    until = time.monotonic() + _DYING_S
    while is_ours(left) and time.monotonic() < until:
        if (held := _dead(left)) is not None:
            Owner.here("").sign(held)
            for manifest in left.glob(f"*/{_MANIFEST}"):
                manifest.rename(manifest.with_name(_LEFT))
            return True
        time.sleep(_DYING_S / 50)
    return False


def _dead(folder: Path) -> int | None:
    """The lock of a folder whose owner is dead: it signed on this host, where a live one's lock cannot be had."""
    try:
        held = lock(_lock_of(folder))
    except OSError:  # gone meanwhile, or another user's
        return None
    if held is not None and ((owner := Owner.of(_lock_of(folder))) is None or owner.is_foreign()):
        os.close(held)
        return None
    return held


def _remove_remains(root: Path) -> None:
    for folder in left_behind(root):
        try:
            if is_ours(folder):
                shutil.rmtree(folder)
            if not os.path.lexists(folder):
                _lock_of(folder).unlink()
        except OSError as error:  # it is no reason not to run
            logger.warning("%s, of a run that ended, cannot be removed: %s", folder, error.strerror)


def left_behind(root: Path) -> Iterator[Path]:
    """Folders whose owner was killed, of this user on this host, by the names that :func:`claim` gives; nobody can take
    one over until the next is asked for.
    """
    for file in root.glob(f"{_PREFIX}*.lock"):
        folder = file.with_suffix("")
        if _NAME.fullmatch(folder.name) and (held := _dead(folder)) is not None:
            try:
                yield folder
            finally:
                os.close(held)
