"""The prompts' values in one environment, and the ledger of what they take: one never changes without the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import numpy as np

from verl_rhyme.history.environment import Damaged, Environment
from verl_rhyme.history.record import CorruptRecord, PromptHistory
from verl_rhyme.history.room import Entry, Room


class Values:
    """Reads and writes within the caller's LMDB transactions.

    A transaction that fails leaves a ledger that is no longer the environment's: make a new one.

    Args:
        opened: The environment.
        bound: Bytes that values may fill.
        epochs: Visits of a prompt that are kept where there is room for all.
        warn: Told of damaged values.

    Attributes:
        room: The ledger, as of the environment's last transaction and what was done here since.

    Raises:
        Damaged: The environment's list of prompts is unreadable.
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
                raise Damaged(f"its list of prompts is unreadable: {error}") from error

    def get(self, txn: Any, key: bytes) -> PromptHistory:
        """What is kept of a prompt; an empty history where that is nothing, or damaged."""
        return self.decoded(key, self.stored(txn, key))

    def stored(self, txn: Any, key: bytes) -> np.ndarray | None:
        """A prompt's value, uint8[n], a copy; ``None`` where there is none."""
        value = txn.get(key, db=self.opened.prompts)
        return None if value is None else np.frombuffer(value, dtype=np.uint8).copy()

    def decoded(self, key: bytes, value: np.ndarray | None) -> PromptHistory:
        """What a prompt's value says; as :meth:`get`. From any thread."""
        if value is not None:
            try:
                return PromptHistory.decode(value)
            except CorruptRecord as error:
                self._warn(f"the history of prompt {key.hex()} starts anew: {error}")
        return PromptHistory.build([])

    def put(self, txn: Any, key: bytes, value: bytes, entry: Entry) -> None:
        """Keep a value, with its :func:`entry_of`."""
        txn.put(key, value, db=self.opened.prompts)
        self.room.record(key, entry)

    def evict(self, txn: Any, key: bytes) -> None:
        """Keep nothing of a prompt but what its size was."""
        txn.delete(key, db=self.opened.prompts)
        self.room.evict(key)

    def note(self, txn: Any, changed: Iterable[bytes], forgotten: Iterable[bytes]) -> None:
        """Bring the environment's list of prompts up to the ledger."""
        for key in changed:
            txn.put(key, msgpack.packb(self.room.entry(key)), db=self.opened.seen)
        for key in forgotten:
            txn.delete(key, db=self.opened.seen)


def stored_bytes(value_bytes: int) -> int:
    """Bytes of the file that a value takes: whole pages, with LMDB's page header."""
    return -(-(value_bytes + 16) // 4096) * 4096


def entry_of(value: bytes, history: PromptHistory, epoch: int) -> Entry:
    """What the ledger knows of a prompt that was last seen in ``epoch``."""
    size, units = stored_bytes(len(value)), len(np.unique(history.visit))
    tokens, step = len(history.tokens) - len(history.bounds), int(history.step.max())
    return Entry(epoch, size / units, units, size, tokens, len(history), step, int(history.visit[-1]))
