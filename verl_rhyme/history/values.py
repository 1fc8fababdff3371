"""Values of the prompts in one environment, with the ledger of their sizes; both change together.

:mod:`verl_rhyme.history.retention` decides which values stay: an append keeps as many visits of a prompt as the level
allows, or does not write it, to avoid thrashing. :meth:`Values.evict_excess` runs in the append's transaction while the
values exceed their bound; LMDB reuses their pages later. :meth:`Values.copy_to` runs if LMDB still has no pages left (a
transaction writes before it frees, and values need contiguous pages), into a new, dense environment that replaces the
old one. Until then the disk holds both: ``max_bytes`` and the values once more.
"""

from __future__ import annotations

import logging
from typing import Any

import msgpack
import numpy as np

from verl_rhyme.history.environment import CorruptEnvironment, Environment
from verl_rhyme.history.record import CorruptRecord, PromptHistory
from verl_rhyme.history.retention import Entry, Retention
from verl_rhyme.once import warn_once

logger = logging.getLogger(__name__)

#: Bytes per commit of a copy: LMDB holds uncommitted data in memory.
_COMMIT_BYTES = 256 << 20


class Values:
    """Reads and writes of values within the caller's LMDB transactions; useless after one that failed.

    Raises CorruptEnvironment if the environment's list of prompts cannot be read.
    """

    def __init__(self, opened: Environment, bound: int, epochs: int) -> None:
        self.opened = opened
        self.ledger = Retention(bound, epochs)  # after the environment's last transaction and the changes here since
        with opened.env.begin() as txn:
            try:
                for key, value in txn.cursor(db=opened.seen):
                    entry = Entry(*msgpack.unpackb(value))
                    self.ledger.record(bytes(key), entry)
                    self.ledger.now = max(self.ledger.now, entry.epoch)
            except (TypeError, ValueError, msgpack.UnpackException) as error:
                raise CorruptEnvironment(f"its list of prompts cannot be read: {error}") from error
        self.ledger.changed.clear()

    def stored(self, txn: Any, key: bytes) -> np.ndarray | None:
        """Return a copy of a prompt's value, uint8[n]."""
        value = txn.get(key, db=self.opened.prompts)
        return None if value is None else np.frombuffer(value, dtype=np.uint8).copy()

    def decoded(self, key: bytes, value: np.ndarray | None) -> PromptHistory:
        """Decode a value; an empty history if there is none or it is damaged. May be called from any thread."""
        if value is not None:
            try:
                return PromptHistory.decode(value)
            except CorruptRecord as error:
                message = "the history of a prompt is damaged and starts empty (%s, logged once): %s"
                warn_once(logger, message, key.hex(), error)
        return PromptHistory.build([])

    def put(self, txn: Any, key: bytes, history: PromptHistory, value: bytes, epoch: int) -> Entry:
        """Write the history of a prompt that was last seen in ``epoch``; ``value`` is its encoding."""
        txn.put(key, value, db=self.opened.prompts)
        entry = _entry(value, history, epoch)
        self.ledger.record(key, entry)
        return entry

    def evict(self, txn: Any, key: bytes) -> None:
        txn.delete(key, db=self.opened.prompts)
        self.ledger.evict(key)

    def evict_excess(self, txn: Any) -> int:
        """Evict until the values fit their bound; return the visits that the remaining prompts lost."""
        lost = 0
        while excess := self.ledger.excess(self.ledger.bound):
            for key, visits in excess.items():
                entry, history = self.ledger.get(key), self._latest(txn, key, visits)
                assert entry is not None
                if history:
                    lost += entry.units - visits
                    self.put(txn, key, history, history.encode(), entry.epoch)
                else:
                    self.evict(txn, key)
        return lost

    def save_ledger(self, txn: Any) -> None:
        for key in self.ledger.changed:
            if (entry := self.ledger.get(key)) is None:
                txn.delete(key, db=self.opened.seen)
            else:
                txn.put(key, msgpack.packb(entry), db=self.opened.seen)
        self.ledger.changed.clear()

    def copy_to(self, into: Environment, bound: int) -> int:
        """Copy as many values as fit into ``bound`` bytes into a new environment; return as :meth:`evict_excess`."""
        excess = self.ledger.excess(bound)
        entries = list(self.ledger.entries())
        with self.opened.env.begin(buffers=True) as source:
            while entries:
                with into.env.begin(write=True) as txn:
                    written = 0
                    while entries and written < _COMMIT_BYTES:
                        key, entry = entries.pop()
                        written += self._copy(source, txn, into, key, entry, excess.get(key, entry.units))
        return sum(entry.units - excess[key] for key, entry in self.ledger.entries() if excess.get(key))

    def _copy(self, source: Any, txn: Any, into: Environment, key: bytes, entry: Entry, visits: int) -> int:
        value = source.get(key, b"", db=self.opened.prompts) if visits else b""
        if visits < entry.units and value:
            history = self._latest(source, key, visits)
            value = history.encode() if history else b""
            entry = _entry(value, history, entry.epoch) if history else entry
        if value:
            txn.put(key, value, db=into.prompts)
        else:
            entry = entry.emptied()
        txn.put(key, msgpack.packb(entry), db=into.seen)
        return entry.bytes

    def _latest(self, txn: Any, key: bytes, visits: int) -> PromptHistory | None:
        """``None`` if no visits are left or the value is damaged."""
        return (self.decoded(key, self.stored(txn, key)).latest(visits) or None) if visits else None


def stored_bytes(value_bytes: int) -> int:
    """Return the bytes of the file for a value: whole pages, with LMDB's page header."""
    return -(-(value_bytes + 16) // 4096) * 4096


def _entry(value: bytes, history: PromptHistory, epoch: int) -> Entry:
    size, units = stored_bytes(len(value)), len(np.unique(history.visit))
    tokens, step = len(history.tokens) - len(history.bounds), int(history.step.max())
    return Entry(epoch, size / units, units, size, tokens, len(history), step, int(history.visit[-1]))
