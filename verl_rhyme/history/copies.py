"""Copies of prompts' histories, on a node that does not record: a file for each prompt that its replicas answer.

The next visit of a prompt changes its history, so that a copy serves the requests of one visit: copies are bounded by
bytes, and those that were needed longest ago go first. A file's time of modification is when the copy was last known to
be the latest, in nanoseconds since the epoch. A prompt that has no history has an empty file.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from verl_rhyme.history import owner, packing, share
from verl_rhyme.history.record import CorruptRecord, PromptHistory, version_of

logger = logging.getLogger(__name__)

_LOCK_TIMEOUT_S = 10.0
#: Bytes of disk that a file takes at least.
_BLOCK = 4096


class _Copy(NamedTuple):
    version: bytes  # version_of() its value
    size: int  # bytes of disk
    time: int  # as of, in ns since the epoch


_NONE = _Copy(b"", 0, 0)


class Copies:
    """The one writer of a folder of copies; any number of :class:`CopyReader` may read it meanwhile.

    Copies are worth nothing to another process: what stands in the folder goes.

    Args:
        path: Node-local folder, made where it is missing.
        max_bytes: Bound of all files; ``None``: half of what is free (:mod:`~verl_rhyme.history.share`).

    Raises:
        HistoryError: Another process writes here.
        OSError: The folder cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | None) -> None:
        self._path = Path(path)
        self._known: OrderedDict[bytes, _Copy] = OrderedDict()  # the one needed longest ago first
        self._bytes = 0
        self._lock: int | None = owner.claim(self._path, uuid.uuid4().hex, _LOCK_TIMEOUT_S)
        self._bound = max_bytes or share.automatic(self._path)

    def outdated(self, asked: Mapping[bytes, int]) -> dict[bytes, bytes]:
        """Prompts whose copy is older than it should be, each with its copy's version; empty: there is no copy.

        Args:
            asked: Prompt key -> time from which on the copy must have been the latest, in ns since the epoch.
        """
        known = {key: self._known.get(key, _NONE) for key in asked}
        return {key: known[key].version for key, time in asked.items() if known[key].time < time}

    def confirm(self, key: bytes, time: int) -> None:
        """The copy of a prompt is still the latest.

        Args:
            time: As of, in ns since the epoch.

        Raises:
            OSError: It is gone, as old files of a temporary folder may be; it is outdated from now on.
        """
        try:
            os.utime(self._file(key), ns=(time, time))
        except OSError:
            self._bytes -= self._known.pop(key).size
            raise
        self._known[key] = self._known[key]._replace(time=time)
        self._known.move_to_end(key)

    def put(self, key: bytes, value: np.ndarray | bytes, time: int) -> None:
        """Replace a prompt's copy; those needed longest ago go for it.

        Args:
            value: uint8[n], ``PromptHistory.encode()``; empty: the prompt has no history. One that is larger than the
                bound counts as empty.
            time: As of, in ns since the epoch.

        Raises:
            OSError: It cannot be written; the copy is as it was.
        """
        if len(value) > self._bound:
            logger.warning(
                "a prompt's history of %d bytes is larger than history.max_bytes=%d", len(value), self._bound
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
        """End, and delete the folder. Closing twice does nothing."""
        if self._lock is not None:
            owner.disclaim(self._path, self._lock, delete=True)
            self._lock = None

    def _file(self, key: bytes) -> Path:
        return self._path / key.hex()


class CopyReader:
    """Reads :class:`Copies`; bad data is logged once, counted in :attr:`errors`, and reads as no history."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        packing.warm()
        self._path = os.fspath(path)
        #: Times that data could not be used.
        self.errors = 0

    def arrived(self, key: bytes, asked: int) -> bool:
        """Whether the copy of a prompt was the latest when it was asked for, or later.

        Args:
            asked: In ns since the epoch.
        """
        try:
            return os.stat(self._file(key)).st_mtime_ns >= asked
        except OSError:
            return False

    def get(self, key: bytes) -> PromptHistory | None:
        """A prompt's copy; ``None`` where there is none, or the prompt has no history."""
        try:
            value = np.fromfile(self._file(key), dtype=np.uint8)
            return PromptHistory.decode(value) if len(value) else None
        except FileNotFoundError:
            return None
        except (OSError, CorruptRecord, MemoryError) as error:
            self.errors += 1
            if self.errors == 1:
                logger.warning(
                    "a copied history in %s cannot be read, drafting goes on without (told once): %s", self._path, error
                )
            return None

    def _file(self, key: bytes) -> str:
        return os.path.join(self._path, key.hex())
