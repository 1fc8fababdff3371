"""Lock of a checkpoint folder: one run at a time, from its script's first check to the end of its training process.

``verl-rhyme claim`` locks ``run.lock``. The run script keeps that lock, and its training process inherits the
descriptor in :data:`VARIABLE`. The training process of an own command opens the file itself, before Ray starts. The
lock ends with the last of these processes, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from verl_rhyme.config import ConfigError
from verl_rhyme.history.ownership import Owner

LOCK_FILE = "run.lock"
#: Environment variable with the number of the inherited descriptor.
VARIABLE = "VERL_RHYME_RUN_LOCK"

#: Descriptors of this process until its end, by folder.
_held: dict[Path, int] = {}


def take(folder: Path, pid: int) -> int:
    """Lock a folder, created if missing, until the returned descriptor and its copies are closed.

    Raises ConfigError if another run holds the lock, OSError if the folder cannot be written. A refusal of a later run
    names ``pid``. A file system without locks is reported on standard error; there, a second run is not noticed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / LOCK_FILE
    descriptor = _inherited(file)
    if descriptor is None:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(_in_use(folder)) from None
    except OSError as error:
        print(
            f"verl-rhyme: {folder} is on a file system without locks ({error.strerror}): a second run that starts "
            "there meanwhile is not noticed; set another folder, or start only one",
            file=sys.stderr,
        )
    replace(Owner.here(run=time.strftime("since %Y-%m-%d %H:%M:%S %z")), pid=pid).sign(descriptor)
    return descriptor


def hold(folder: Path) -> None:
    """Lock a folder until this process ends; a second call does nothing. Raises like :func:`take`."""
    if folder not in _held:
        _held[folder] = take(folder, os.getpid())
        os.set_inheritable(_held[folder], False)


def is_held(folder: Path) -> bool:
    return folder in _held


def user(folder: Path) -> str | None:
    """Return a message with the :func:`owner` of a folder that another process uses; ``None`` without locks. The
    process that inherited the lock from its run script uses the folder itself.
    """
    if _inherited(folder / LOCK_FILE) is not None:
        return None
    try:
        with open(folder / LOCK_FILE, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _in_use(folder)
    except OSError:
        pass
    return None


def _inherited(file: Path) -> int | None:
    with suppress(KeyError, ValueError, OSError):
        descriptor = int(os.environ[VARIABLE])
        if os.path.samestat(os.fstat(descriptor), os.stat(file)):
            return descriptor
    return None


def owner(folder: Path) -> str:
    """Return the process that locked a folder last, with its host and time, in words."""
    last = Owner.of(folder / LOCK_FILE)
    return f"process {last.pid} on {last.host} {last.run}" if last else "another process"


def _in_use(folder: Path) -> str:
    last, died = Owner.of(folder / LOCK_FILE), ""
    if last is not None and last.host != socket.gethostname():
        died = (
            f". If {last.host} died or was cut off, the file server may keep its lock for long: once no process of "
            f"that run is left, delete {folder / LOCK_FILE}"
        )
    return (
        f"{folder} is in use by {owner(folder)}: end that run first, or set another folder (RUN_DIR=... of the "
        f"recipes, trainer.default_local_dir=... of verl){died}"
    )
