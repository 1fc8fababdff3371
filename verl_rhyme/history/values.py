"""Values of the prompts in one environment, with the ledger of their sizes; both change together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import numpy as np

from verl_rhyme.history.environment import Damaged, Environment
from verl_rhyme.history.record import CorruptRecord, PromptHistory
from verl_rhyme.history.room import Entry, Room


class Values:
    """Reads and writes of values within the caller's LMDB transactions.

    After a failed transaction the ledger differs from the environment: create a new object.

    Args:
        opened: Environment.
        bound: Most bytes of all values.
        epochs: Most visits per prompt.
        warn: Function that logs a warning about damaged values.

    Attributes:
        room: Ledger after the environment's last transaction and the changes here since.

    Raises:
        Damaged: The environment's list of prompts cannot be read.
    """

    def __init__(self, opened: Environment, bound: int, epochs: int, warn: Callable[[str], None]) -> None:
        self.opened = opened
        self.room = Room(bound, epochs)
        self._warn = warn
        with opened.env.begin() as txn:
            try:
                for key, value in txn.cursor(db=opened.seen):
                    entry = Entry(*msgpack.unpackb(value))
                    self.room.record(bytes(key), entry)
                    self.room.now = max(self.room.now, entry.epoch)
            except (TypeError, ValueError, msgpack.UnpackException) as error:
                raise Damaged(f"its list of prompts cannot be read: {error}") from error

    def get(self, txn: Any, key: bytes) -> PromptHistory:
        """Return the history of a prompt; an empty history if there is none or it is damaged."""
        return self.decoded(key, self.stored(txn, key))

    def stored(self, txn: Any, key: bytes) -> np.ndarray | None:
        """Return a copy of a prompt's value, uint8[n]; ``None`` if there is none."""
        value = txn.get(key, db=self.opened.prompts)
        return None if value is None else np.frombuffer(value, dtype=np.uint8).copy()

    def decoded(self, key: bytes, value: np.ndarray | None) -> PromptHistory:
        """Decode a prompt's value like :meth:`get`; may be called from any thread."""
        if value is not None:
            try:
                return PromptHistory.decode(value)
            except CorruptRecord as error:
                self._warn(f"the history of prompt {key.hex()} is damaged and starts empty: {error}")
        return PromptHistory.build([])

    def put(self, txn: Any, key: bytes, value: bytes, entry: Entry) -> None:
        """Write a value and its :func:`entry_of`."""
        txn.put(key, value, db=self.opened.prompts)
        self.room.record(key, entry)

    def evict(self, txn: Any, key: bytes) -> None:
        """Delete a prompt's value; its size stays known."""
        txn.delete(key, db=self.opened.prompts)
        self.room.evict(key)

    def note(self, txn: Any, changed: Iterable[bytes], forgotten: Iterable[bytes]) -> None:
        """Update the environment's list of prompts from the ledger."""
        for key in changed:
            txn.put(key, msgpack.packb(self.room.entry(key)), db=self.opened.seen)
        for key in forgotten:
            txn.delete(key, db=self.opened.seen)


def stored_bytes(value_bytes: int) -> int:
    """Return the bytes of the file for a value: whole pages, with LMDB's page header."""
    return -(-(value_bytes + 16) // 4096) * 4096


def entry_of(value: bytes, history: PromptHistory, epoch: int) -> Entry:
    """Return the ledger entry of a prompt that was last seen in ``epoch``."""
    size, units = stored_bytes(len(value)), len(np.unique(history.visit))
    tokens, step = len(history.tokens) - len(history.bounds), int(history.step.max())
    return Entry(epoch, size / units, units, size, tokens, len(history), step, int(history.visit[-1]))
