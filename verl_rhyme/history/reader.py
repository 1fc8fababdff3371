"""Reader of the history, for any number of processes, while one process writes it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import numpy as np

from verl_rhyme.history import environment, history_folder, packing
from verl_rhyme.history.environment import CorruptEnvironment, Environment, HistoryMismatch
from verl_rhyme.history.record import CorruptRecord, PromptHistory
from verl_rhyme.once import warn_once

logger = logging.getLogger(__name__)


class HistoryReader:
    """Reader of a :class:`~verl_rhyme.history.store.HistoryStore` through its memory map.

    The store may not exist yet, and a restore or clear may replace it at any time; the reader follows. Deleted files
    stay readable until the store has written others. Unusable data never raise: they are logged once, counted in
    :attr:`errors`, and read as no history, as is another vocabulary than ``namespace``.
    """

    def __init__(self, path: str | os.PathLike[str], namespace: str, refresh_interval: float = 1.0):
        packing.warm()
        self._path = Path(path)
        self._namespace = namespace
        self._interval = refresh_interval  # seconds between two checks for a replaced store
        self._next_look = 0.0
        self._identity: tuple[str, int, int] | None = None
        self._environment: Environment | None = None
        self._in_use: int | None = None
        #: Number of reads of unusable data, and of failures to open the store.
        self.errors = 0

    def get(self, key: bytes) -> PromptHistory | None:
        """Return a prompt's history after the last finished append."""
        opened = self._latest()
        if opened is None:
            return None
        try:
            try:
                value = _copy(opened, key)
            except lmdb.MapResizedError:
                opened.env.set_mapsize(0)
                value = _copy(opened, key)
            return None if value is None else PromptHistory.decode(value)
        except (lmdb.Error, CorruptRecord, MemoryError) as error:
            self._bad(error)
            return None

    @contextmanager
    def value(self, key: bytes) -> Iterator[memoryview]:
        """Yield a prompt's value as a view of the map, unchecked, valid within the block; empty if there is none.

        Only for the writer's process, which is the only one to resize the map. Raises lmdb.Error.
        """
        opened = self._latest()
        if opened is None:
            yield memoryview(b"")
            return
        with opened.env.begin(db=opened.prompts, buffers=True) as txn:
            yield memoryview(txn.get(key, b""))

    def _latest(self) -> Environment | None:
        if time.monotonic() >= self._next_look:
            self.refresh()
        return self._environment

    def refresh(self) -> None:
        identity = environment.identity(self._path)
        if identity is not None and identity != self._identity:
            self._reopen(identity)
        self._next_look = time.monotonic() + self._interval

    def _reopen(self, identity: tuple[str, int, int]) -> None:
        self.close()
        folder = self._path / identity[0]
        try:
            with history_folder.excluding_writer(self._path) as unused:
                self._environment = environment.acquire(folder, self._namespace, unused)
            self._in_use = history_folder.mark_in_use(self._path)
            self._identity = identity
        except (lmdb.Error, OSError, CorruptEnvironment, HistoryMismatch) as error:
            self._bad(error)

    def close(self) -> None:
        """Release the environment; a later :meth:`get` opens it again."""
        if self._environment is not None:
            environment.release(self._environment)
        if self._in_use is not None:
            os.close(self._in_use)
        self._environment = self._in_use = self._identity = None
        self._next_look = 0.0

    def _bad(self, error: Exception) -> None:
        self.errors += 1
        message = "the history in %s cannot be read; drafting continues without it (logged once): %s"
        warn_once(logger, message, self._path, error)


def _copy(opened: Environment, key: bytes) -> np.ndarray | None:
    """A view of the map would change when the writer reuses its pages."""
    with opened.env.begin(db=opened.prompts, buffers=True) as txn:
        value = txn.get(key)
        # numpy releases the interpreter lock during the copy, which takes long if pages of the map are not in memory.
        return None if value is None else np.frombuffer(value, dtype=np.uint8).copy()
