"""Making room: how what was kept goes.

:mod:`verl_rhyme.history.room` decides what stays. A prompt that arrives in an append is kept with as many visits as its
level gives it, or not written at all, so that nothing thrashes (``HistoryStore.append``). What others keep goes here:

- :func:`shed`, in the append's transaction, while values fill more than their bound (0.7 of
  ``history.max_bytes``): excess visits are cut off, excess prompts deleted, and LMDB uses their pages again later;
- :func:`rewrite`, where pages run out all the same (a transaction writes before it frees, and values need pages in a
  row): what stays is copied into a new, dense environment, which then takes the old one's place. Until then both are on
  the disk: ``max_bytes`` and the values once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack

from verl_rhyme.history import environment
from verl_rhyme.history.environment import Environment
from verl_rhyme.history.room import Entry
from verl_rhyme.history.values import Values, entry_of

#: Bytes that a rewrite commits at a time: LMDB holds in memory what is not committed.
_COMMIT_BYTES = 256 << 20


@dataclass
class Shed:
    """What went: prompts of which nothing is kept, prompts that keep less, and how many visits those lost."""

    gone: set[bytes] = field(default_factory=set)
    shortened: set[bytes] = field(default_factory=set)
    epochs: int = 0


def shed(values: Values, txn: Any) -> Shed:
    """Evict until the values fit into their bound; ``txn`` writes, and the list of prompts is left to the caller."""
    room, did = values.room, Shed()
    while excess := room.excess(room.bound):
        for key, epochs in excess.items():
            entry = room.entry(key)
            history = values.get(txn, key).latest(epochs) if epochs else None
            if history:
                did.epochs += entry.units - epochs
                did.shortened.add(key)
                value = history.encode()
                values.put(txn, key, value, entry_of(value, history, entry.epoch))
            else:  # nothing is to stay, or it is damaged
                did.gone.add(key)
                values.evict(txn, key)
    return did


def rewrite(values: Values, into: Environment, bound: int) -> set[bytes]:
    """Copy what fits into ``bound`` bytes into a new environment, which nobody reads yet.

    Returns:
        The prompts that went.

    Raises:
        lmdb.Error, OSError: It does not fit on the disk or into the map; the old environment is as it was.
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
    """One prompt, with the latest visits of it. Returns its bytes."""
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
