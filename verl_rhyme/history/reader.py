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

logger = logging.getLogger(__name__)


class HistoryReader:
    """Reader of a :class:`~verl_rhyme.history.store.HistoryStore` through its memory map.

    The store may not exist yet, and a restore or clear may replace it at any time; the reader follows, also after a
    fork. Deleted files stay readable until the store has written them again. Unusable data never raise: they are logged
    once, counted in :attr:`errors`, and read as no history, as is another vocabulary than ``namespace``.
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
        self._logged = False
        #: Number of reads of unusable data.
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
            self._bad(f"prompt {key.hex()}: {error}")
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
        opened = self._environment
        if time.monotonic() >= self._next_look or (opened is not None and opened.pid != os.getpid()):
            self.refresh()
        return self._environment

    def refresh(self) -> None:
        self._next_look = time.monotonic() + self._interval
        identity = environment.identity(self._path)
        forked = self._environment is not None and self._environment.pid != os.getpid()
        if not forked and (identity == self._identity or (identity is None and self._environment is not None)):
            return
        self.close()
        self._identity = identity
        if identity is None:
            return
        try:
            self._environment, self._in_use = self._open(), history_folder.mark_in_use(self._path)
        except (lmdb.Error, OSError, CorruptEnvironment, HistoryMismatch) as error:
            if replaced := environment.identity(self._path) != identity:  # while it was being opened
                self._next_look = 0.0
            else:
                self._bad(str(error))
            if replaced or not isinstance(error, (CorruptEnvironment, HistoryMismatch)):
                self._identity = None  # the next check tries again

    def close(self) -> None:
        """Release the environment; a later :meth:`get` opens it again."""
        if self._environment is not None:
            environment.release(self._environment)
        if self._in_use is not None:
            os.close(self._in_use)
        self._environment = self._in_use = None
        self._identity = None
        self._next_look = 0.0

    def _open(self) -> Environment | None:
        folder = environment.current(self._path)
        if folder is None:
            return None
        with history_folder.excluding_writer(self._path) as unchecked:
            if unchecked:
                environment.check(folder)
            return environment.acquire(folder, self._namespace)

    def _bad(self, what: str) -> None:
        self.errors += 1
        if not self._logged:
            self._logged = True
            logger.warning(
                "the history in %s cannot be read; drafting continues without it (logged once): %s", self._path, what
            )


def _copy(opened: Environment, key: bytes) -> np.ndarray | None:
    """A view of the map would change when the writer reuses its pages."""
    with opened.env.begin(db=opened.prompts, buffers=True) as txn:
        value = txn.get(key)
        # numpy releases the interpreter lock during the copy, which takes long if pages of the map are not in memory.
        return None if value is None else np.frombuffer(value, dtype=np.uint8).copy()
