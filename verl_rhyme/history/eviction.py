"""Eviction: how values of prompts are removed.

:mod:`verl_rhyme.history.room` decides which values stay. A prompt in an append is kept with as many visits as the level
allows, or not written at all, to avoid thrashing (``HistoryStore.append``). Values of other prompts are removed here:

- :func:`shed` runs in the append's transaction while the values exceed their bound (0.7 of ``history.max_bytes``). It
  drops excess visits and deletes excess prompts; LMDB reuses their pages later.
- :func:`rewrite` runs if LMDB still has no pages left (a transaction writes before it frees, and values need contiguous
  pages). It copies the remaining values into a new, dense environment that replaces the old one. Until then the disk
  holds both: ``max_bytes`` and the values once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack

from verl_rhyme.history import environment
from verl_rhyme.history.environment import Environment
from verl_rhyme.history.room import Entry
from verl_rhyme.history.values import Values, entry_of

#: Bytes per commit of a rewrite: LMDB holds uncommitted data in memory.
_COMMIT_BYTES = 256 << 20


@dataclass
class Shed:
    """Result of an eviction.

    Attributes:
        gone: Prompts that lost all visits.
        shortened: Prompts that lost some visits.
        epochs: Visits that the shortened prompts lost.
    """

    gone: set[bytes] = field(default_factory=set)
    shortened: set[bytes] = field(default_factory=set)
    epochs: int = 0


def shed(values: Values, txn: Any) -> Shed:
    """Evict until the values fit their bound, in the write transaction ``txn``; the caller updates the prompt list."""
    room, result = values.room, Shed()
    while excess := room.excess(room.bound):
        for key, epochs in excess.items():
            entry = room.entry(key)
            history = values.get(txn, key).latest(epochs) if epochs else None
            if history:
                result.epochs += entry.units - epochs
                result.shortened.add(key)
                value = history.encode()
                values.put(txn, key, value, entry_of(value, history, entry.epoch))
            else:  # no visit stays, or the value is damaged
                result.gone.add(key)
                values.evict(txn, key)
    return result


def rewrite(values: Values, into: Environment, bound: int) -> set[bytes]:
    """Copy as many values as fit into ``bound`` bytes into a new environment that no process reads yet.

    Returns:
        The evicted prompts.

    Raises:
        lmdb.Error, OSError: The copy does not fit on the disk or into the map; the old environment is unchanged.
    """
    excess = values.room.excess(bound)
    entries = list(values.room.entries())
    old = values.opened
    with old.env.begin(db=old.prompts, buffers=True) as source:
        while entries:
            with into.env.begin(write=True) as txn:
                written = 0
                while entries and written < _COMMIT_BYTES:
                    key, entry = entries.pop()
                    written += _copy(values, source, txn, into, key, entry, excess.get(key, entry.units))
    environment.fill_up(into.folder, into.env)
    return {key for key, epochs in excess.items() if epochs == 0}


def _copy(values: Values, source: Any, txn: Any, into: Environment, key: bytes, entry: Entry, epochs: int) -> int:
    """Copy the latest visits of one prompt and return their bytes."""
    value = source.get(key, b"") if epochs else b""
    if epochs < entry.units and value:
        history = values.get(source, key).latest(epochs)
        value = history.encode() if len(history) else b""  # damaged
        entry = entry_of(value, history, entry.epoch) if value else entry
    if value:
        txn.put(key, value, db=into.prompts)
    else:
        entry = entry.emptied()
    txn.put(key, msgpack.packb(entry), db=into.seen)
    return entry.bytes
