"""Whose a history folder is: its one writer holds ``writer.lock`` (flock), and ``owner.json`` says who that is.

Who reads in it, for as long as its run lasts, shares ``in_use.lock``: a writer that was killed alone leaves a folder
that is still needed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from verl_rhyme.history.environment import HistoryError
from verl_rhyme.history.ownership import OWNER_FILE, NotOurs, Owner, is_ours, is_user_folder, lock, make_private

logger = logging.getLogger(__name__)

_LOCK = "writer.lock"
_IN_USE = "in_use.lock"
#: In the order of going, when all else has: who waits for the lock would write into a folder that is being deleted.
_MARKS = (OWNER_FILE, _IN_USE, _LOCK)


def make(path: Path) -> None:
    """Make a history folder, or take one that is there; nobody else may enter it.

    Raises:
        HistoryError: It is a link, or another user's.
        OSError: It cannot be made.
    """
    try:
        make_private(path)
    except NotOurs as error:
        raise _not_ours(error) from None


def _not_ours(error: NotOurs) -> HistoryError:
    return HistoryError(f"no history is kept where others may put theirs: {error.strerror}; set history.dir elsewhere")


def lock_writer(path: Path, timeout: float) -> int:
    """Become the one writer.

    The kernel's lock says whether an owner under this kernel lives, in whichever container. One on another host may
    live without our seeing its lock, so it counts as alive; one of this host before it was booted anew does not.

    Returns:
        A file descriptor; closing it, or the process's death, gives the lock back.

    Raises:
        HistoryError: Another writer is alive, or may be; the folder is a link, or another user's.
    """
    deadline = time.monotonic() + timeout
    while True:
        make(path)  # a writer that ends may delete it while we wait
        try:
            descriptor = lock(path / _LOCK, create=True)
        except FileNotFoundError:
            continue
        except NotOurs as error:
            raise _not_ours(error) from None
        if descriptor is None:
            if time.monotonic() > deadline:
                raise HistoryError(
                    f"another process writes the history in {path}: {Owner.of(path) or 'unknown'}; end it, or give "
                    "this run its own history.dir"
                )
        else:
            try:
                if _is_at(descriptor, path / _LOCK):
                    _refuse_foreign(path)
                    return descriptor
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
            f"own history.dir, on a disk of this node; or, if that run is over, delete {path / OWNER_FILE}"
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
            _empty(path, keep=(_IN_USE, _LOCK))
        (path / _IN_USE).touch(0o600)
        temporary = path / f".{OWNER_FILE}"
        temporary.write_text(json.dumps(asdict(Owner.here(run or ""))) + "\n")
        os.replace(temporary, path / OWNER_FILE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def use(path: Path) -> int | None:
    """Say that a folder is needed, whether its writer lives or not, until the descriptor is closed.

    Returns:
        A file descriptor; ``None`` where there is no writer's folder, or it is just being removed.
    """
    with suppress(OSError):
        return lock(path / _IN_USE, shared=True)
    return None


def disclaim(path: Path, descriptor: int, delete: bool = False) -> None:
    """Give a folder back, or delete it, while the lock is held; with the last one goes its run's in the user's."""
    if delete:
        with suppress(OSError):  # what cannot be deleted stays signed, for the next run to try again
            _empty(path, keep=_MARKS)
            for name in _MARKS:
                (path / name).unlink(missing_ok=True)
            path.rmdir()
        if is_user_folder(path.parent.parent):
            with suppress(OSError):  # not empty, or gone
                path.parent.rmdir()
    else:
        (path / OWNER_FILE).unlink(missing_ok=True)
    os.close(descriptor)


def remove_dead(base: Path, keep: Collection[Path]) -> None:
    """Delete the folders below ``base`` whose writer was killed, but for ``keep``: their lock can be had, and nobody
    reads there. Where ``base`` is in the user's own folder on a node, also those of this user's other runs.

    A folder that no writer of ours signed, or not of this user, is somebody else's.
    """
    shared = is_user_folder(base.parent)
    for file in base.parent.glob(f"*/*/{OWNER_FILE}") if shared else base.glob(f"*/{OWNER_FILE}"):
        folder = file.parent
        of = Owner.of(folder)
        if folder not in keep and is_ours(folder) and (folder / _LOCK).exists() and of is not None:
            if of.is_foreign():  # alive or not, which only its own host can find out
                logger.warning("%s belongs to a run on %s and stays; delete it if that run has ended", folder, of.host)
                continue
            with suppress(HistoryError, OSError):
                _remove(folder)


def _remove(folder: Path) -> None:
    descriptor = lock_writer(folder, timeout=0)
    try:
        unread = lock(folder / _IN_USE)  # none of a run begins to read there meanwhile
    except BaseException:
        os.close(descriptor)
        raise
    if unread is None:
        os.close(descriptor)
        return
    disclaim(folder, descriptor, delete=True)
    os.close(unread)


def _empty(path: Path, keep: Collection[str]) -> None:
    for entry in path.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name not in keep:
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
