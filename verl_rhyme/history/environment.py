"""LMDB environments of the store on disk: select the current one, open them, verify them.

A history folder holds::

    current          name of the environment in use; replaced by rename, so that readers follow a restore or a clear
    env-0003/        data.mdb, lock.mdb
    writer.lock, in_use.lock, owner.json    see :mod:`verl_rhyme.history.history_folder`

LMDB tolerates a killed process, but trusts its file: a damaged file can crash every process that maps it. The writer
therefore verifies the file without LMDB once, before it opens it. A reader verifies it only if no writer is alive.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import msgpack
from lmdb import verify

from verl_rhyme.history.ownership import lock

#: Format of the environment; any other format counts as damaged.
FORMAT = 5
DATA_FILE = "data.mdb"
_LOCK_FILE = "lock.mdb"
#: Other users must not read responses and rewards.
FILE_MODE = 0o600
_CURRENT = "current"
_NAME = re.compile(r"env-\d+")
_META_KEY = b"meta"
#: Most concurrent reader processes: the vLLM workers of a node, with a margin.
_MAX_READERS = 1024


class HistoryError(RuntimeError):
    """The history cannot be used; the message gives a remedy."""


class HistoryMismatch(HistoryError):
    """The history belongs to another tokenizer or vocabulary."""


class CorruptEnvironment(Exception):
    """An environment is damaged; the message describes the damage."""


@dataclass
class Environment:
    """An open environment and its databases. LMDB allows one per file and process, so its users there share it."""

    folder: Path
    env: lmdb.Environment
    prompts: Any  # database: prompt key -> PromptHistory.encode()
    seen: Any  # database: prompt key -> msgpack of retention.Entry, including evicted prompts
    meta: Any  # database: b"meta" -> msgpack {"format", "namespace"}
    users: int = 1  # in this process

    def __post_init__(self) -> None:
        self.file = os.stat(self.folder / DATA_FILE)

    @property
    def bytes(self) -> int:
        return int((self.env.info()["last_pgno"] + 1) * self.env.stat()["psize"])

    def namespace(self) -> str:
        """Return the fingerprint of the recorded vocabulary; CorruptEnvironment if it or the format cannot be read."""
        with self.env.begin() as txn:
            value = txn.get(_META_KEY, db=self.meta)
        try:
            meta = msgpack.unpackb(value) if value is not None else {}
            if meta["format"] == FORMAT:
                return str(meta["namespace"])
        except Exception as error:
            raise CorruptEnvironment(f"its format and vocabulary cannot be read: {error!r}") from error
        raise CorruptEnvironment(f"its format is {meta['format']}, but this version reads format {FORMAT}")


_open: dict[Path, Environment] = {}
_open_lock = threading.Lock()


def create(folder: Path, namespace: str, map_size: int) -> Environment:
    """Create and open an empty environment; the folder must not exist."""
    folder.mkdir(mode=0o700)
    opened = _acquire(folder, map_size, create=True)
    try:
        with opened.env.begin(write=True) as txn:
            txn.put(_META_KEY, msgpack.packb({"format": FORMAT, "namespace": namespace}), db=opened.meta)
    except BaseException:
        release(opened)
        raise
    return opened


def acquire(folder: Path, namespace: str, unused: bool = False) -> Environment:
    """Open an environment, or share it if this process has it open already. Pair with :func:`release`.

    ``unused``: no process writes to it, so verify it first. Raises lmdb.Error, CorruptEnvironment if it cannot be read,
    and HistoryMismatch if it has another vocabulary.
    """
    if unused:
        check(folder)
    opened = _acquire(folder, 0, create=False)
    try:
        recorded = opened.namespace()
        if recorded != namespace:
            raise HistoryMismatch(
                f"the history in {folder} belongs to vocabulary {recorded}, but this run's vocabulary is {namespace}, "
                "where its tokens mean other text: use its tokenizer, or another history.dir"
            )
        if unused and os.stat(folder / DATA_FILE).st_size < opened.bytes:
            # :func:`check` misses the missing end of a large value. Its checksum fails, but the map must not end there.
            os.truncate(folder / DATA_FILE, opened.bytes)
    except BaseException:
        release(opened)
        raise
    return opened


def _acquire(folder: Path, map_size: int, create: bool) -> Environment:
    folder = folder.resolve()
    with _open_lock:
        if folder in _open:
            _open[folder].users += 1
            return _open[folder]
        # Never read-only: a writer and a reader of one process share it. A map size of 0 means the size of the file.
        env = lmdb.open(
            str(folder),
            map_size=map_size,
            max_dbs=3,
            max_readers=_MAX_READERS,
            create=create,
            metasync=False,
            mode=FILE_MODE,
        )
        try:
            opened = Environment(folder, env, *_databases(env, create))
        except BaseException:
            env.close()
            raise
        _open[folder] = opened
        return opened


def _databases(env: lmdb.Environment, create: bool = False) -> list[Any]:
    return [env.open_db(name, create=create) for name in (b"prompts", b"seen", b"meta")]


def release(opened: Environment) -> None:
    """Release an environment; the last user closes it."""
    with _open_lock:
        opened.users -= 1
        if opened.users == 0:
            opened.env.close()
            del _open[opened.folder]


@contextmanager
def open_to_inspect(folder: Path) -> Iterator[Environment]:
    """Open a store, without disturbing its writer, or a snapshot, without writing to its folder."""
    if (folder / _LOCK_FILE).exists():
        opened = _acquire(folder, 0, create=False)
        try:
            yield opened
        finally:
            release(opened)
    else:
        check(folder)
        with lmdb.open(str(folder), readonly=True, lock=False, max_dbs=3) as env:
            opened = Environment(folder, env, *_databases(env))
            if opened.file.st_size < opened.bytes:
                raise CorruptEnvironment("the file is truncated")
            yield opened


def check(folder: Path) -> None:
    """Verify an environment's file, page by page, without mapping it: about 0.1 s per gigabyte.

    No process may write to it meanwhile. Values have checksums of their own.
    """
    try:
        problems = verify.verify(str(folder / DATA_FILE))
    except Exception as error:  # the verifier itself fails on unexpected bytes
        raise CorruptEnvironment(f"unreadable: {error!r}") from error
    if problems:
        raise CorruptEnvironment("; ".join(problems[:3]))


def current(path: Path) -> Path | None:
    try:
        name = (path / _CURRENT).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return path / name if _NAME.fullmatch(name) else None


def identity(path: Path) -> tuple[str, int, int] | None:
    """Return what changes when the environment in use is replaced: its name, device and inode (used again)."""
    folder = current(path)
    try:
        status = folder and os.stat(folder / DATA_FILE)
    except OSError:
        return None
    return (folder.name, status.st_dev, status.st_ino) if folder and status else None


def keep(path: Path, opened: Environment) -> bool:
    """Make the files of the environment in use new for cleaners of temporary folders; False if one is gone."""
    try:
        for file in (path / _CURRENT, opened.folder / _LOCK_FILE, opened.folder / DATA_FILE):
            os.utime(file)
    except OSError:
        return False
    return identity(path) == (opened.folder.name, opened.file.st_dev, opened.file.st_ino)


def publish(path: Path, folder: Path) -> None:
    """Make an environment the one in use, atomically, and delete all others. Readers keep their maps."""
    temporary = path / f".{_CURRENT}"
    temporary.write_text(folder.name + "\n")
    os.replace(temporary, path / _CURRENT)
    for other in path.glob("env-[0-9]*"):
        if other.name != folder.name:
            shutil.rmtree(other, ignore_errors=True)


def new_folder(path: Path, *others: Path) -> Path:
    """Return the path of a new environment, with a higher number than all others, also those in memory only."""
    numbers = [int(folder.name[4:]) for folder in (*others, *path.glob("env-[0-9]*"))]
    return path / f"env-{max(numbers, default=0) + 1:04d}"


def probe(folder: Path) -> None:
    """Try what a store needs of a folder, which may not exist yet: files, locks, a memory map. Raises OSError."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))  # a file fails below
    try:
        with tempfile.TemporaryDirectory(prefix=".verl_rhyme-", dir=existing) as name:
            descriptor = lock(Path(name, "lock"), create=True)
            if descriptor is not None:
                os.close(descriptor)
            with lmdb.open(name, map_size=1 << 20, metasync=False) as env, env.begin(write=True) as txn:
                txn.put(b"key", b"value")
    except lmdb.Error as error:
        raise OSError(str(error)) from error
