"""Private folders and lock files in places that users, hosts and runs share: /tmp, /dev/shm, a cluster's disk.

A folder is emptied or deleted only if it is a real folder of this user, no link, and its process is dead. A free lock
proves that for processes of this host only, because on some network file systems each client has separate locks. The
holder of a lock therefore signs the folder (:class:`Owner`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

#: File in a folder that identifies its last writer.
OWNER_FILE = "owner.json"
_USER_FOLDER = re.compile(r"verl_rhyme-\d+")


@dataclass(frozen=True)
class Owner:
    """A process that holds a lock, or held it when it was killed.

    A pid alone does not identify a process: pids repeat after a reboot and in other containers and hosts.
    """

    run: str
    host: str
    boot: str  # id of the kernel's boot
    pid: int  # for messages only

    @classmethod
    def here(cls, run: str) -> Owner:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(run, socket.gethostname(), boot, os.getpid())

    @classmethod
    def of(cls, path: Path) -> Owner | None:
        """Return the last signer of a folder or lock file; ``None`` if it ended in order or never signed."""
        try:
            return cls(**json.loads((path / OWNER_FILE if path.is_dir() else path).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def sign(self, descriptor: int) -> None:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{json.dumps(asdict(self))}\n".encode(), 0)

    def is_foreign(self) -> bool:
        """A reboot or a new container keeps boot id or host name."""
        here = Owner.here("")
        return self.boot != here.boot and self.host != here.host

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (boot {self.boot[:8]}), of run {self.run!r}"


def user_folder(base: str) -> Path:
    """Return the folder of this user's runs below a place that users share; it may not exist yet."""
    return Path(base, f"verl_rhyme-{os.geteuid()}")


def is_user_folder(path: Path) -> bool:
    return _USER_FOLDER.fullmatch(path.name) is not None


def make_private(path: Path) -> None:
    """Create a folder or make it private, with its parents up to the user's folder.

    Raises OSError, PermissionError if one is a link or another user's.
    """
    folders = [path, *path.parents]
    top = next((number for number, folder in enumerate(folders) if is_user_folder(folder)), 0)
    for folder in reversed(folders[: top + 1]):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        _require_own(folder)
        if folder.stat().st_mode & 0o077:
            with suppress(OSError):  # some network file systems have no file modes
                folder.chmod(0o700)


def is_own_folder(path: Path) -> bool:
    """Return whether the path is a folder of this user, and no link."""
    try:
        _require_own(path)
    except OSError:
        return False
    return True


def _require_own(path: Path) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(errno.EPERM, f"{path} is a link")
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(errno.EPERM, f"{path} is not a folder")
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{path} belongs to user {status.st_uid}")


def lock(file: Path, create: bool = False, shared: bool = False) -> int | None:
    """Acquire the kernel's lock on a file of this user, valid across containers, until the descriptor is closed.

    ``None`` if a process of this host holds it. Raises OSError, PermissionError for another user's file.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    descriptor = os.open(file, flags, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"{file} is not a plain file of this user")
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
