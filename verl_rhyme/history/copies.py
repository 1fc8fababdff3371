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
from pathlib import Path

import numpy as np

from verl_rhyme.history import history_folder, packing, share
from verl_rhyme.history.record import CorruptRecord, PromptHistory, version_of
from verl_rhyme.once import warn_once

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 10.0
#: Smallest size of a file on disk, in bytes.
_BLOCK = 4096


class Copies:
    """Writer of a folder of copies, one per folder; existing files there are useless and deleted.

    Beyond ``max_bytes`` (``None``: half of the free space) the least recently used copies go first. Raises HistoryError
    if another process writes to the folder.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | None, object_store: int = 0) -> None:
        self._path = Path(path)
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # bytes on disk, least recently used first
        self._bytes = 0
        self._lock: int | None = history_folder.acquire(self._path, uuid.uuid4().hex, _LOCK_TIMEOUT_S)
        try:
            self._bound = max_bytes or share.automatic(self._path, object_store)
        except BaseException:
            os.close(self._lock)
            raise

    def outdated(self, asked: Mapping[bytes, int]) -> dict[bytes, bytes]:
        """Return the prompts whose copy may be older than the given time, with its version (empty: no copy)."""
        found = {}
        for key, time in asked.items():
            try:
                with open(self._file(key), "rb") as file:
                    if os.fstat(file.fileno()).st_mtime_ns < time:
                        found[key] = version_of(file.read(_BLOCK))
            except FileNotFoundError:
                found[key] = b""
        return found

    def confirm(self, key: bytes, time: int) -> bool:
        """Note that a copy was still the latest at ``time``; return False if it is gone meanwhile."""
        try:
            os.utime(self._file(key), ns=(time, time))
        except FileNotFoundError:
            return False
        self._sizes.move_to_end(key)
        return True

    def put(self, key: bytes, value: np.ndarray | bytes, time: int) -> None:
        """Replace a prompt's copy by ``value``, ``PromptHistory.encode()`` as uint8[n], the latest at ``time``.

        An empty value means no history, as does one larger than the bound. After an OSError the folder is useless.
        """
        if len(value) > self._bound:
            message = (
                "a prompt's history of %d bytes is larger than history.max_bytes=%d and is not copied (logged once)"
            )
            warn_once(logger, message, len(value), self._bound)
            value = b""
        size, before = max(_BLOCK, -(-len(value) // _BLOCK) * _BLOCK), self._sizes.get(key, 0)
        if before:
            self._sizes.move_to_end(key)
        while len(self._sizes) > bool(before) and self._bytes - before + size > self._bound:
            oldest, gone = self._sizes.popitem(last=False)
            self._bytes -= gone
            self._file(oldest).unlink(missing_ok=True)
        part = self._path / f".{key.hex()}"
        part.write_bytes(value)  # type: ignore[arg-type]  # any buffer
        os.utime(part, ns=(time, time))
        part.replace(self._file(key))
        self._bytes += size - before
        self._sizes[key] = size

    def close(self) -> None:
        """Delete the folder and give up the lock. A second call does nothing."""
        if self._lock is not None:
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
            message = "a copied history in %s cannot be read; its prompt drafts without a history (logged once): %s"
            warn_once(logger, message, self._path, error)
            return None

    def _file(self, key: bytes) -> str:
        return os.path.join(self._path, key.hex())
