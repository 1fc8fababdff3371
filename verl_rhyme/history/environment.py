"""The store's LMDB environments on disk: which one is current, opening them, checking that they are sound.

A history folder holds::

    current          the name of the environment in use; replaced by rename, so that readers follow a restore or a clear
    env-0003/        data.mdb, lock.mdb
    corrupt-0002/    what was found damaged, kept to be looked at
    writer.lock, in_use.lock, owner.json    see :mod:`verl_rhyme.history.owner`

LMDB is safe against a killed process, but trusts its file: a damaged one can crash whoever maps it. So a file is
verified without LMDB before it is opened, once, by the writer; a reader does so only where no writer is alive.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lmdb
import msgpack
from lmdb import verify

#: Format of the environment; another one is treated as damaged.
FORMAT = 4
DATA_FILE = "data.mdb"
#: Responses and rewards are nobody else's to read.
FILE_MODE = 0o600
_CURRENT = "current"
_NAME = re.compile(r"env-\d+")
_META_KEY = b"meta"
#: Of LMDB's meta page: page size, last page in use, number of the transaction.
_META = struct.Struct("=40x I 92x Q Q")
#: Processes that may read at once: the vLLM workers of a node, and some room.
_MAX_READERS = 1024


class HistoryError(RuntimeError):
    """The history cannot be used; the message says how to mend it."""


class HistoryMismatch(HistoryError):
    """The history belongs to another tokenizer or vocabulary."""


class Damaged(Exception):
    """An environment is not sound; the message says how."""


@dataclass
class Environment:
    """An open environment and its databases, shared by all who use the same folder in one process.

    LMDB allows one open environment per file and process, and none that was inherited through a fork.

    Attributes:
        env: LMDB's own object.
        prompts: Prompt key -> ``PromptHistory.encode()``.
        seen: Prompt key -> msgpack of :class:`verl_rhyme.history.room.Entry`, also of prompts that have no room.
        meta: ``b"meta"`` -> msgpack ``{"format", "namespace"}``.
    """

    folder: Path
    env: lmdb.Environment
    pid: int
    users: int = 1
    prompts: Any = field(init=False)
    seen: Any = field(init=False)
    meta: Any = field(init=False)

    def open_databases(self, create: bool) -> None:
        self.prompts, self.seen, self.meta = (
            self.env.open_db(name, create=create) for name in (b"prompts", b"seen", b"meta")
        )

    def namespace(self) -> str:
        """Fingerprint of the vocabulary it was recorded with.

        Raises:
            Damaged: There is none, or the format is not this one's.
        """
        with self.env.begin() as txn:
            value = txn.get(_META_KEY, db=self.meta)
        try:
            meta = msgpack.unpackb(value) if value is not None else {}
            if meta["format"] == FORMAT:
                return str(meta["namespace"])
        except Exception as error:
            raise Damaged(f"its description is unreadable: {error!r}") from error
        raise Damaged(f"its format is {meta['format']}, this version reads {FORMAT}")


_open: dict[Path, Environment] = {}
_open_lock = threading.Lock()


def _fresh_lock() -> None:
    global _open_lock
    _open_lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_fresh_lock)


def create(folder: Path, namespace: str, map_size: int) -> Environment:
    """Make and open an empty environment; the folder must not exist."""
    folder.mkdir(mode=0o700)
    opened = _acquire(folder, map_size, create=True)
    try:
        with opened.env.begin(write=True) as txn:
            txn.put(_META_KEY, msgpack.packb({"format": FORMAT, "namespace": namespace}), db=opened.meta)
    except BaseException:
        release(opened)
        raise
    return opened


def acquire(folder: Path) -> Environment:
    """Open an environment, or share it where this process has it open. Pair with :func:`release`.

    Raises:
        lmdb.Error: It cannot be opened.
    """
    return _acquire(folder, 0, create=False)


def _acquire(folder: Path, map_size: int, create: bool) -> Environment:
    folder = folder.resolve()
    with _open_lock:
        inherited = [e for e in _open.values() if e.pid != os.getpid()]
        for entry in inherited:  # through a fork: LMDB forbids their use here, the parent's stay as they are
            del _open[entry.folder]
            entry.env.close()
        if folder in _open:
            _open[folder].users += 1
            return _open[folder]
        # Never read-only: a writer and a reader of one process share it. A map size of 0 is the file's own.
        env = lmdb.open(
            str(folder),
            map_size=map_size,
            max_dbs=3,
            max_readers=_MAX_READERS,
            create=create,
            metasync=False,
            mode=FILE_MODE,
        )
        opened = Environment(folder, env, os.getpid())
        try:
            opened.open_databases(create)
        except BaseException:
            env.close()
            raise
        _open[folder] = opened
        return opened


def release(opened: Environment) -> None:
    """Give back what :func:`acquire` or :func:`create` gave; the last user closes it."""
    with _open_lock:
        opened.users -= 1
        if opened.users <= 0 and opened.pid == os.getpid():
            opened.env.close()
            if _open.get(opened.folder) is opened:
                del _open[opened.folder]


def check(folder: Path) -> None:
    """Verify an environment's file, page by page, without mapping it: about 0.1 s a gigabyte.

    Nobody may write to it meanwhile. The prompts' values carry their own checksums.

    Raises:
        Damaged: It is cut off, altered, or no LMDB file.
    """
    try:
        problems = _cut_off(folder / DATA_FILE) + verify.verify(str(folder / DATA_FILE))
    except (verify.VerifyError, OSError) as error:
        raise Damaged(str(error)) from error
    except Exception as error:  # bytes that the verifier itself did not expect
        raise Damaged(f"unreadable: {error!r}") from error
    if problems:
        raise Damaged("; ".join(problems[:3]))


def fill_up(folder: Path, env: lmdb.Environment) -> None:
    """Make the file as long as it says it is: LMDB does not write pages that a transaction took and gave back."""
    size = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
    if os.stat(folder / DATA_FILE).st_size < size:
        os.truncate(folder / DATA_FILE, size)


def _cut_off(file: Path) -> list[str]:
    """What the verifier does not look for: the end of a large value beyond the end of the file."""
    with open(file, "rb") as opened:
        first = opened.read(_META.size)
        if len(first) < _META.size:
            return ["it is cut off"]
        page = _META.unpack(first)[0]
        opened.seek(page)
        second = opened.read(_META.size)
        if len(second) < _META.size:
            return ["it is cut off"]
        last = max((meta[2], meta[1]) for meta in map(_META.unpack, (first, second)))[1]
        size = opened.seek(0, os.SEEK_END)
    return [f"{size} bytes where it says it has {(last + 1) * page}"] if size < (last + 1) * page else []


def current(path: Path) -> Path | None:
    """The environment in use, or ``None`` where there is none."""
    try:
        name = (path / _CURRENT).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return path / name if _NAME.fullmatch(name) else None


def newest(path: Path) -> Path | None:
    """The environment made last: the one in use, should the file that names it be lost."""
    return max(path.glob("env-[0-9]*"), key=lambda folder: int(folder.name[4:]), default=None)


def identity(path: Path) -> tuple[int, int] | None:
    """What changes when the environment in use is replaced: device and inode of its file. ``None``: there is none."""
    folder = current(path)
    try:
        status = None if folder is None else os.stat(folder / DATA_FILE)
    except OSError:
        return None
    return None if status is None else (status.st_dev, status.st_ino)


def publish(path: Path, folder: Path) -> None:
    """Make an environment the one in use; atomic."""
    temporary = path / f".{_CURRENT}"
    temporary.write_text(folder.name + "\n")
    os.replace(temporary, path / _CURRENT)


def new_folder(path: Path) -> Path:
    """A name for a new environment, never used before in this history folder."""
    numbers = [int(p.name.rpartition("-")[2]) for kind in ("env", "corrupt") for p in path.glob(f"{kind}-[0-9]*")]
    return path / f"env-{max(numbers, default=0) + 1:04d}"


def set_aside(folder: Path) -> Path:
    """Keep a damaged environment out of the way."""
    aside = folder.with_name(folder.name.replace("env-", "corrupt-"))
    folder.rename(aside)
    return aside


def remove_others(path: Path, keep: Path | None) -> None:
    """Delete environments that are not in use: left by a killed writer, or just replaced. Readers keep their maps."""
    for folder in path.glob("env-[0-9]*"):
        if folder != keep:
            shutil.rmtree(folder, ignore_errors=True)
