"""Ownership of a history folder: its writer holds ``writer.lock`` (flock), and ``owner.json`` identifies the writer.

Processes of the run that read in the folder share ``in_use.lock``, because the folder is still needed if only the
writer is killed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from verl_rhyme.history.environment import HistoryError, probe
from verl_rhyme.history.ownership import (
    OWNER_FILE,
    Owner,
    is_own_folder,
    is_user_folder,
    lock,
    make_private,
    user_folder,
)

logger = logging.getLogger(__name__)

_LOCK = "writer.lock"
_IN_USE = "in_use.lock"
_MARKS = (OWNER_FILE, _IN_USE, _LOCK)


def acquire(path: Path, run: str | None, timeout: float) -> int:
    """Create a history folder if it is missing, acquire the writer's lock and sign the folder.

    Data of another run are deleted, as are folders of killed writers next to this one; data of a dead writer of this
    run stay. Without a ``run`` all data stay. ``timeout``: seconds for a writer that is just ending. The lock is free
    once the returned descriptor is closed. Raises HistoryError if another writer is or may be alive, or the folder is a
    link or another user's.
    """
    descriptor = _lock_writer(path, timeout)
    try:
        owner = Owner.of(path)
        if run is not None and (owner is None or owner.run != run):
            _empty(path)
        (path / _IN_USE).touch(0o600)
        unsigned = path / f".{OWNER_FILE}"
        unsigned.write_text(json.dumps(asdict(Owner.here(run or ""))) + "\n")
        unsigned.replace(path / OWNER_FILE)
        if run is not None:
            _remove_dead(path.parent, keep=path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def keep(path: Path, held: int) -> bool:
    """Make the files of :func:`acquire` new for cleaners of temporary folders; False if one is gone."""
    try:
        for name in _MARKS:
            os.utime(path / name)
    except OSError:
        return False
    return _is_at(held, path / _LOCK)


def place() -> Path:
    """Return the folder of this user's runs without ``history.dir``: the first that can hold a store, memory last."""
    places = [user_folder(base) for base in (tempfile.gettempdir(), "/var/tmp", "/dev/shm")]
    for folder in places:
        with suppress(HistoryError):
            check(folder)
            return folder
    return places[0]  # a later check shows why


def here(folder: str | os.PathLike[str]) -> Path:
    """Return a folder; if it is of :func:`place` on another node and this node cannot hold a store there, the folder of
    the same name that can."""
    path = Path(folder)
    if is_user_folder(path.parent):
        try:
            check(path)
        except HistoryError:
            return place() / path.name
    return path


def check(folder: str | os.PathLike[str]) -> None:
    """Check that a folder, which may not exist yet, can hold a store here; a HistoryError has reason and remedy."""
    path = Path(folder)
    base = next((parent for parent in (path, *path.parents) if is_user_folder(parent)), None)
    try:
        if base is not None and os.path.lexists(base) and not is_own_folder(base):
            raise PermissionError(errno.EPERM, f"{base} is a link or belongs to another user")
        probe(path)
    except OSError as error:
        raise HistoryError(
            f"the history cannot be kept in {folder} ({error.strerror or error}): set history.dir to a folder on a "
            "local disk that you can write to and that has file locks"
        ) from error


def _lock_writer(path: Path, timeout: float) -> int:
    """The kernel's lock shows whether an owner under this kernel is alive, in any container. An owner on another host
    counts as alive, because its lock may not be visible here. An owner from before a reboot of this host does not.
    """
    deadline = time.monotonic() + timeout
    while True:
        descriptor = None
        try:
            make_private(path)
            descriptor = lock(path / _LOCK, create=True)
        except FileNotFoundError:  # the writer before has just deleted the folder
            pass
        except PermissionError as error:
            raise HistoryError(
                f"the history folder is not private to this user: {error.strerror}; set history.dir to another folder"
            ) from None
        if descriptor is not None:
            if _is_at(descriptor, path / _LOCK):
                break
            os.close(descriptor)
        if time.monotonic() > deadline:
            raise HistoryError(
                f"another process writes the history in {path}: {Owner.of(path) or 'unknown'}; end it, or set "
                "another history.dir for this run"
            )
        time.sleep(0.05)
    owner = Owner.of(path)
    if owner is not None and owner.is_foreign():
        os.close(descriptor)
        raise HistoryError(
            f"the history in {path} belongs to {owner}, which may be alive on that machine: set another history.dir "
            f"for this run, on a disk of this node; or, if that run has ended, delete {path / OWNER_FILE}"
        )
    return descriptor


def _is_at(descriptor: int, file: Path) -> bool:
    """The previous writer may have deleted a locked file with its folder."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _remove_dead(base: Path, keep: Path) -> None:
    """Delete the folders below ``base`` whose writer was killed, except ``keep``: their lock is free, without readers.

    In the user's folder of a node this includes the user's other runs. A folder that no writer signed stays.
    """
    shared = is_user_folder(base.parent)
    for file in base.parent.glob(f"*/*/{OWNER_FILE}") if shared else base.glob(f"*/{OWNER_FILE}"):
        folder, owner = file.parent, Owner.of(file.parent)
        if folder == keep or owner is None or not is_own_folder(folder) or not (folder / _LOCK).exists():
            continue
        if owner.is_foreign():  # alive or not, which only its own host can find out
            logger.warning("%s belongs to a run on %s and stays; delete it if that run has ended", folder, owner.host)
            continue
        with suppress(HistoryError, OSError):
            _remove(folder)


def _remove(folder: Path) -> None:
    held = _lock_writer(folder, timeout=0)
    try:
        unread = lock(folder / _IN_USE)  # while it is held, no process starts to read there
        if unread is not None:
            _delete(folder)
            os.close(unread)
    finally:
        os.close(held)


def release(path: Path, descriptor: int, delete: bool = False) -> None:
    """Release the writer's lock, and perhaps delete the folder, unless it may be another run's by now."""
    if _is_at(descriptor, path / _LOCK):
        with suppress(OSError):
            if delete:
                _delete(path)
            else:
                (path / OWNER_FILE).unlink()
    os.close(descriptor)


def _delete(path: Path) -> None:
    """Delete a folder under another name: a process that waits for its lock must not write into the rest of it."""
    gone = path.rename(path.with_name(f".{path.name}.{uuid.uuid4().hex}"))
    _empty(gone)  # its marks go last: a next run can then delete the rest that a killed process leaves
    shutil.rmtree(gone)
    if is_user_folder(path.parent.parent):
        with suppress(OSError):  # not empty
            path.parent.rmdir()


def mark_in_use(path: Path) -> int | None:
    """Mark a folder as needed until the returned descriptor is closed; ``None`` if there is none."""
    with suppress(OSError):
        return lock(path / _IN_USE, shared=True)
    return None


@contextmanager
def excluding_writer(path: Path) -> Iterator[bool]:
    """Yield whether the folder has no live writer; if so, none can start within the block."""
    descriptor = None
    with suppress(OSError):
        descriptor = lock(path / _LOCK, shared=True)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _empty(path: Path) -> None:
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in _MARKS:
            entry.unlink()
