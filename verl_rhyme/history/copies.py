"""Copies of prompts' histories on a node without the store: one file for each prompt that its replicas answer.

A copy serves the requests of one visit, because the next visit changes the history. A file's modification time is the
time at which the copy was last known to be the latest, in ns since the epoch. A prompt without a history has an empty
file.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from verl_rhyme.history import history_folder, packing, share
from verl_rhyme.history.environment import HistoryError
from verl_rhyme.history.record import CorruptRecord, PromptHistory, version_of

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 10.0
#: Smallest size of a file on disk, in bytes.
_BLOCK = 4096


class _Copy(NamedTuple):
    version: bytes  # version_of() the value
    size: int  # bytes on disk
    time: int  # time at which it was the latest, in ns since the epoch


_NONE = _Copy(b"", 0, 0)


class Copies:
    """Writer of a folder of copies, one per folder; any number of :class:`CopyReader` may read it at the same time.

    Existing files in the folder are useless and deleted. Beyond ``max_bytes`` (``None``: half of the free space) the
    least recently used copies go first. Times are in ns since the epoch. Raises :class:`HistoryError` if another
    process writes to the folder.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | None, object_store: int = 0) -> None:
        self._path = Path(path)
        self._known: OrderedDict[bytes, _Copy] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._run = uuid.uuid4().hex
        self._lock: int | None = history_folder.acquire(self._path, self._run, _LOCK_TIMEOUT_S)
        try:
            self._bound = max_bytes or share.automatic(self._path, object_store)
        except BaseException:
            os.close(self._lock)
            raise

    def outdated(self, asked: Mapping[bytes, int]) -> dict[bytes, bytes]:
        """Return the prompts whose copy may be older than the given time, with its version (empty: no copy)."""
        for key in [key for key in asked if key in self._known and not self._file(key).exists()]:
            self._bytes -= self._known.pop(key).size  # deleted, as by a cleaner of temporary folders
        known = {key: self._known.get(key, _NONE) for key in asked}
        return {key: known[key].version for key, time in asked.items() if known[key].time < time}

    def confirm(self, key: bytes, time: int) -> bool:
        """Note that a copy was still the latest at ``time``; return False if it is gone meanwhile."""
        copy = self._known.pop(key, _NONE)
        try:
            os.utime(self._file(key), ns=(time, time))
        except OSError:
            self._bytes -= copy.size
            return False
        self._known[key] = copy._replace(time=time)
        return True

    def put(self, key: bytes, value: np.ndarray | bytes, time: int) -> None:
        """Replace a prompt's copy by ``value``, ``PromptHistory.encode()`` as uint8[n], the latest at ``time``.

        An empty value means no history, as does one larger than the bound. After a HistoryError or an OSError the old
        copy stays, and the next call tries again.
        """
        if len(value) > self._bound:
            logger.warning(
                "a prompt's history of %d bytes is larger than history.max_bytes=%d and is not copied to this node",
                len(value),
                self._bound,
            )
            value = b""
        size = max(_BLOCK, -(-len(value) // _BLOCK) * _BLOCK)
        before = self._known.get(key, _NONE).size
        if before:
            self._known.move_to_end(key)
        while len(self._known) > bool(before) and self._bytes - before + size > self._bound:
            oldest, gone = self._known.popitem(last=False)
            self._bytes -= gone.size
            self._file(oldest).unlink(missing_ok=True)
        part = self._path / f".{key.hex()}"
        if self._lock is not None:
            self._lock = history_folder.renew(self._path, self._run, self._lock, _LOCK_TIMEOUT_S)
        try:
            part.write_bytes(value)  # type: ignore[arg-type]  # any buffer
            os.utime(part, ns=(time, time))
            part.replace(self._file(key))
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._bytes += size - before
        self._known[key] = _Copy(version_of(value), size, time)

    def close(self) -> None:
        """Delete the folder and give up the lock. A second call does nothing."""
        if self._lock is not None:
            with suppress(HistoryError, OSError):  # as HistoryStore.close
                self._lock = history_folder.renew(self._path, self._run, self._lock, timeout=0)
            history_folder.release(self._path, self._lock, delete=True)
            self._lock = None

    def _file(self, key: bytes) -> Path:
        return self._path / key.hex()


class CopyReader:
    """Reader of :class:`Copies`. Unusable data are logged once, counted in :attr:`errors`, and read as no history."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        packing.warm()
        self._path = os.fspath(path)
        #: Number of reads of unusable data.
        self.errors = 0

    def arrived(self, key: bytes, asked: int) -> bool:
        """Return whether the copy of a prompt was the latest at the time of the request, or later."""
        try:
            return os.stat(self._file(key)).st_mtime_ns >= asked
        except OSError:
            return False

    def get(self, key: bytes) -> PromptHistory | None:
        try:
            value = np.fromfile(self._file(key), dtype=np.uint8)
            return PromptHistory.decode(value) if len(value) else None
        except FileNotFoundError:
            return None
        except (OSError, CorruptRecord, MemoryError) as error:
            self.errors += 1
            if self.errors == 1:
                logger.warning(
                    "a copied history in %s cannot be read; its prompt drafts without a history (logged once): %s",
                    self._path,
                    error,
                )
            return None

    def _file(self, key: bytes) -> str:
        return os.path.join(self._path, key.hex())
