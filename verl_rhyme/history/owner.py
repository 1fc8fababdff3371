"""Whose a history folder is: its one writer holds ``writer.lock`` (flock), and ``owner.json`` says who that is."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_rhyme.history.environment import HistoryError

_LOCK = "writer.lock"
_OWNER = "owner.json"


@dataclass(frozen=True)
class Owner:
    """The writer of a folder, also one that was killed.

    A pid alone says nothing: it is used again after a reboot, and another container or host has its own.

    Attributes:
        run: Name of the run that it writes for.
        host, boot: The machine, and the start of its kernel that the writer lived under.
        pid: To be told, not to be trusted.
    """

    run: str
    host: str
    boot: str
    pid: int

    @classmethod
    def here(cls, run: str) -> Owner:
        """This process."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(run, socket.gethostname(), boot, os.getpid())

    @classmethod
    def of(cls, path: Path) -> Owner | None:
        """Who wrote to a folder last; ``None`` where that ended in order, or was never told."""
        try:
            return cls(**json.loads((path / _OWNER).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def is_foreign(self) -> bool:
        """Whether it was on another machine, as far as can be told: a reboot or a new container keeps one of both."""
        here = Owner.here("")
        return self.boot != here.boot and self.host != here.host

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (boot {self.boot[:8]}), of run {self.run!r}"


def lock_writer(path: Path, timeout: float) -> int:
    """Become the one writer.

    The kernel's lock says whether an owner under this kernel lives, in whichever container. One on another host may
    live without our seeing its lock, so it counts as alive; one of this host before it was booted anew does not.

    Returns:
        A file descriptor; closing it, or the process's death, gives the lock back.

    Raises:
        HistoryError: Another writer is alive, or may be.
    """
    deadline = time.monotonic() + timeout
    while True:
        path.mkdir(parents=True, exist_ok=True)  # a writer that ends may delete it while we wait
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path / _LOCK):
                _refuse_foreign(path)
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise HistoryError(
                    f"another process writes the history in {path}: {Owner.of(path) or 'unknown'}; end it, or give "
                    "this run its own history.dir"
                ) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.05)


def _is_at(descriptor: int, file: Path) -> bool:
    """Whether a locked file was not deleted meanwhile, with its folder, by the writer that had it before."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _refuse_foreign(path: Path) -> None:
    owner = Owner.of(path)
    if owner is not None and owner.is_foreign():
        raise HistoryError(
            f"the history in {path} belongs to {owner}, another machine's, where it may be alive: give this run its "
            f"own history.dir, on a disk of this node; or, if that run is over, delete {path / _OWNER}"
        )


def claim(path: Path, run: str | None, timeout: float) -> int:
    """Become the one writer.

    Args:
        run: What another run left is deleted, what a dead writer of this run left stays. ``None``: all stays.
        timeout: Seconds to wait for a writer that is just ending.

    Returns, raises: As :func:`lock_writer`.
    """
    descriptor = lock_writer(path, timeout)
    try:
        owner = Owner.of(path)
        if run is not None and (owner is None or owner.run != run):
            _empty(path)
        temporary = path / f".{_OWNER}"
        temporary.write_text(json.dumps(asdict(Owner.here(run or ""))) + "\n")
        os.replace(temporary, path / _OWNER)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def disclaim(path: Path, descriptor: int, delete: bool = False) -> None:
    """Give a folder back, or delete it, while the lock is held."""
    if delete:
        shutil.rmtree(path, ignore_errors=True)
    else:
        (path / _OWNER).unlink(missing_ok=True)
    os.close(descriptor)


def remove_dead(base: Path, keep: Collection[Path]) -> None:
    """Delete the folders below ``base`` whose writer was killed: those whose lock can be had, but for ``keep``.

    A folder that no writer of ours signed is somebody else's.
    """
    for file in base.glob(f"*/{_OWNER}"):
        if file.parent not in keep and (file.parent / _LOCK).exists() and Owner.of(file.parent) is not None:
            with suppress(HistoryError, OSError):
                disclaim(file.parent, lock_writer(file.parent, timeout=0), delete=True)


def left_behind(base: Path) -> Iterator[tuple[Path, Owner]]:
    """Folders of writers that do not seem to live, and that no run whose ``history.dir`` is ``base`` deletes.

    They lie below ``base`` and were written on what seems another machine (also this one, when its name changed with a
    reboot), or below another run's folder in ``base``.
    """
    for file in sorted((*base.glob(f"*/{_OWNER}"), *base.glob(f"*/*/{_OWNER}"))):
        folder, owner = file.parent, Owner.of(file.parent)
        if owner is not None and (folder.parent != base or owner.is_foreign()):
            with without_writer(folder) as dead:
                if dead:
                    yield folder, owner


def _empty(path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != _LOCK:
            entry.unlink()


@contextmanager
def without_writer(path: Path) -> Iterator[bool]:
    """Whether no writer is alive; none can start within the block then."""
    try:
        descriptor = os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
