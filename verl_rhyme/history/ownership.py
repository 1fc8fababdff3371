"""Folders and lock files of one user in places that users, hosts and runs share: /tmp, /dev/shm, a cluster's disk.

They are made private. Nothing is emptied or deleted before it is known to be a real folder of this user's, no link, and
its process to be dead: a lock that can be had says so of this host's processes only, for on some network file systems
each client has locks of its own. So whoever holds a lock signs (:class:`Owner`).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import stat
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

#: In a folder, who wrote to it last.
OWNER_FILE = "owner.json"
_USER_FOLDER = re.compile(r"verl_rhyme-\d+")


class NotOurs(OSError):
    """A link, or another user's; ``strerror`` says which."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.EPERM, what)


@dataclass(frozen=True)
class Owner:
    """A process that holds a lock, or held it when it was killed.

    A pid alone says nothing: it is used again after a reboot, and another container or host has its own.

    Attributes:
        run: Name of the run that it works for.
        host, boot: The machine, and the start of its kernel that the process lived under.
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
        """Who signed a folder or a lock file last; ``None`` where that ended in order, or was never told."""
        try:
            return cls(**json.loads((path / OWNER_FILE if path.is_dir() else path).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def sign(self, descriptor: int) -> None:
        """Write it to an open file, in place of what that holds."""
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{json.dumps(asdict(self))}\n".encode(), 0)

    def is_foreign(self) -> bool:
        """Whether it was on another machine, as far as can be told: a reboot or a new container keeps one of both."""
        here = Owner.here("")
        return self.boot != here.boot and self.host != here.host

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} (boot {self.boot[:8]}), of run {self.run!r}"


def user_folder() -> Path:
    """Where this user's runs keep what is theirs on a node; it may not be there yet."""
    return Path(tempfile.gettempdir(), f"verl_rhyme-{os.geteuid()}")


def is_user_folder(path: Path) -> bool:
    """Whether a folder is, by its name, a user's :func:`user_folder` on some node."""
    return _USER_FOLDER.fullmatch(path.name) is not None


def make_private(path: Path) -> None:
    """Make a folder, or take one that is there, which nobody else may enter; so is each one above it up to the user's.

    Raises:
        NotOurs: One of these is a link, or another user's.
        OSError: It cannot be made.
    """
    folders = [path, *path.parents]
    top = next((number for number, folder in enumerate(folders) if is_user_folder(folder)), 0)
    for folder in reversed(folders[: top + 1]):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
        _require_ours(folder)
        if folder.stat().st_mode & 0o077:
            with suppress(OSError):  # some network file systems have no modes
                folder.chmod(0o700)


def is_ours(path: Path) -> bool:
    """Whether it is a folder of this user's, and no link."""
    try:
        _require_ours(path)
    except OSError:
        return False
    return True


def _require_ours(path: Path) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise NotOurs(f"{path} is a link")
    if not stat.S_ISDIR(status.st_mode):
        raise NotOurs(f"{path} is no folder")
    if not _is_mine(status.st_uid, path):
        raise NotOurs(f"{path} belongs to the user {status.st_uid}")


def _is_mine(uid: int, folder: Path) -> bool:
    """Whether files of that user are those that this process makes: some network file systems have one user for all."""
    if uid == os.geteuid():
        return True
    try:
        with tempfile.TemporaryFile(dir=folder) as mine:
            return os.fstat(mine.fileno()).st_uid == uid
    except OSError:
        return False


def lock(file: Path, create: bool = False, shared: bool = False) -> int | None:
    """The kernel's lock on a file, in whichever container other holders live, until the descriptor is closed.

    Args:
        file: Of this user.
        create: Make it where it is missing.
        shared: With others that share it.

    Returns:
        A file descriptor; ``None`` where a process of this host holds the lock.

    Raises:
        NotOurs: A link, no plain file, or another user's.
        OSError: It cannot be opened.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    try:
        descriptor = os.open(file, flags, 0o600)
    except OSError as error:
        raise NotOurs(f"{file} is a link") if error.errno == errno.ELOOP else error from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_mine(status.st_uid, file.parent):
            raise NotOurs(f"{file} is no plain file of this user's")
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
