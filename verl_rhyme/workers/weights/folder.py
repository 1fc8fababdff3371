"""Versions of a policy's weights in the files of one node.

A version is a folder of safetensors files, its parts, and a manifest that names them. The manifest comes last: what has
one is whole. Only the user who runs training may read them.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch

#: Where none is named: memory, which all processes of a node share.
SHARED_MEMORY = Path("/dev/shm")
#: Bytes of a part, at least where there is more than one.
PART_BYTES = 256 << 20

#: Parts that are written at a time.
_WRITERS = 2

_PREFIX = "verl_rhyme_weights_"
_MANIFEST = "manifest.json"


class WeightsError(RuntimeError):
    """Weights are missing, damaged, or find no room; the message says how to mend it."""


@dataclass(frozen=True)
class Part:
    """One file: its size, and xxh3 of it, in hexadecimal."""

    bytes: int
    digest: str


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
        try:
            told = json.loads((self._of(version) / _MANIFEST).read_text())
        except FileNotFoundError:
            raise WeightsError(f"{self.path} has no weights of version {version}, only of {self.versions()}") from None
        return [Part(**part) for part in told]

    def part(self, version: int, number: int) -> bytes:
        return self._file(version, number).read_bytes()

    def writer(self, version: int, part_bytes: int = PART_BYTES) -> Writer:
        """For tensors."""
        self.remove(version)
        return Writer(self, version, part_bytes)

    def put(self, version: int, number: int, data: memoryview | bytes, told: Part) -> None:
        """A part that another node told of.

        Raises:
            WeightsError: It is not what was told, or there is no room.
        """
        if len(data) != told.bytes or xxhash.xxh3_64_hexdigest(data) != told.digest:
            raise WeightsError(f"part {number} of weights {version} was damaged on its way")
        try:
            self._make(version)
            unfinished = self._file(version, number).with_suffix(".partial")
            unfinished.write_bytes(data)
            unfinished.rename(self._file(version, number))  # it may be mapped, from before
        except OSError as error:
            raise self._no_room(version, error) from error

    def complete(self, version: int, parts: Iterable[Part]) -> None:
        """All parts are here."""
        manifest = self._of(version) / _MANIFEST
        unfinished = manifest.with_suffix(".partial")
        unfinished.write_text(json.dumps([asdict(part) for part in parts]))
        unfinished.rename(manifest)

    def read(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, mapped rather than copied where that can be done.

        Raises:
            WeightsError: The version is not here, or a part is not whole.
        """
        from safetensors import safe_open

        for number, part in enumerate(self.parts(version)):
            file = self._file(version, number)
            if not file.exists() or file.stat().st_size != part.bytes:
                raise WeightsError(f"{file} is not whole: weights {version} cannot be served from it")
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    yield name, tensors.get_tensor(name)

    def close(self) -> None:
        """All of it goes."""
        shutil.rmtree(self.path, ignore_errors=True)

    def remove(self, version: int) -> None:
        (self._of(version) / _MANIFEST).unlink(missing_ok=True)  # first: it is not whole from now on
        shutil.rmtree(self._of(version), ignore_errors=True)

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
    """Tensors into parts, which are written while further tensors come; ``close`` makes the version whole."""

    def __init__(self, folder: Folder, version: int, part_bytes: int) -> None:
        self._folder, self._version, self._part_bytes = folder, version, part_bytes
        self._tensors: dict[str, torch.Tensor] = {}
        self._bytes = 0
        self._parts: list[Future[Part]] = []
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="weights")

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copies it, to the CPU.

        Raises:
            WeightsError: There is no room.
        """
        self._tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._bytes += tensor.nbytes
        if self._bytes >= self._part_bytes:
            self._write()

    def close(self) -> None:
        if self._tensors:
            self._write()
        parts = [part.result() for part in self._parts]
        self._threads.shutdown()
        self._folder.complete(self._version, parts)

    def _write(self) -> None:
        for part in self._parts[:-_WRITERS]:  # those in memory are few, and what failed is told early
            part.result()
        number, tensors = len(self._parts), self._tensors
        self._parts.append(self._threads.submit(_written, self._folder, self._version, number, tensors))
        self._tensors, self._bytes = {}, 0


def _written(folder: Folder, version: int, number: int, tensors: dict[str, torch.Tensor]) -> Part:
    from safetensors.torch import save_file

    file = folder._file(version, number)
    try:
        folder._make(version)
        save_file(tensors, file)
    except OSError as error:
        raise folder._no_room(version, error) from error
    except Exception as error:  # safetensors has an error of its own for what the system says
        raise folder._no_room(version, OSError(0, str(error))) from error
    digest = xxhash.xxh3_64()
    with file.open("rb") as written:
        while data := written.read(16 << 20):
            digest.update(data)
    return Part(file.stat().st_size, digest.hexdigest())


def claim(root: Path = SHARED_MEMORY) -> Folder:
    """A folder of this process's own; what processes that are dead have left is removed here.

    Raises:
        WeightsError: It cannot be made.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            lock = root / f"{_PREFIX}{uuid.uuid4().hex}.lock"
            if _try_lock(lock, os.O_CREAT) >= 0 and lock.exists():  # until this process ends
                break  # else a cleaner found it before it was locked
        _remove_leftovers(root)
        folder = lock.with_suffix("")
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise WeightsError(
            f"no folder for weights in {root} ({error.strerror}): name another "
            "(actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.relay.folder)"
        ) from error
    return Folder(folder)


def _try_lock(file: Path, flags: int = 0) -> int:
    """The kernel's lock on a file, in whichever container its holder lives; -1 where a live process has it."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except (FileNotFoundError, PermissionError):  # gone meanwhile, or another user's
        if flags:
            raise
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return -1
    return descriptor


def _remove_leftovers(root: Path) -> None:
    for lock in root.glob(f"{_PREFIX}*.lock"):
        descriptor = _try_lock(lock)
        if descriptor >= 0:
            for left in root.glob(f"{lock.stem}*"):  # earlier versions left files beside it
                shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
            os.close(descriptor)
