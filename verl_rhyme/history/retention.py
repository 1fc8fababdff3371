"""Selection of the prompts and visits that fit a byte bound: first fewer visits per prompt, then fewer prompts.

A visit is one group of responses to a prompt. Each prompt has a fixed place in [0, 1), a hash of its key. Its latest
visit has rank ``place``, the visit before ``1 + place``, and so on; ranks below one number, the level, are kept. A
level of 2.3 keeps three visits of 30 % of the prompts and two of the others, a level of 0.4 the latest visit of always
the same 40 %. With reshuffled epochs, room for a share C of the prompts then has a hit rate of C. (Evicting the oldest
first gives about C*C/2, because the evicted prompts come back soonest.) A prompt above the level is not written, but
its size is remembered, so the level follows the sizes of all prompts in both directions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

#: Least number of epochs without a prompt before it counts as gone.
_PATIENCE = 2
_COLUMNS = np.dtype(
    [
        ("key", "V16"),
        ("place", "f8"),
        ("epoch", "i8"),
        ("size", "f8"),
        ("units", "i4"),
        ("bytes", "i8"),
        ("tokens", "i8"),
        ("responses", "i4"),
        ("step", "i8"),
        ("visit", "i8"),
    ]
)


class Entry(NamedTuple):
    """Ledger entry of a prompt."""

    epoch: int  # pass over the data in which the prompt was last seen
    size: float  # bytes of one visit: mean of the kept ones, or what the latest would have
    units: int = 0  # kept visits; if 0, the next three are 0
    bytes: int = 0  # kept
    tokens: int = 0  # kept
    responses: int = 0  # kept
    step: int = -1  # latest training step that recorded the prompt, or would have
    visit: int = -1  # label of the latest visit; -1 if unknown

    def emptied(self) -> Entry:
        return Entry(self.epoch, self.size, step=self.step, visit=self.visit)


def place(key: bytes) -> float:
    """Return a prompt's place in the order of eviction, in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big") / (1 << 48)


class Retention:
    """Ledger of a store: about 70 bytes per prompt, and as much again for Python's index of the keys."""

    def __init__(self, bound: int, epochs: int) -> None:
        self.bound, self.epochs = bound, epochs  # most bytes of all values, most visits of a prompt
        self.now = 0  # current epoch
        self.changed: set[bytes] = set()  # entries set or dropped; the owner clears it
        self._row: dict[bytes, int] = {}
        self._table = np.zeros(64, _COLUMNS)
        self._full, self._cut = epochs, 0.0

    def __len__(self) -> int:
        """Number of recently seen prompts, kept or not."""
        return len(self._row)

    def __contains__(self, key: bytes) -> bool:
        row = self._row.get(key)
        return row is not None and bool(self._table["units"][row])

    def get(self, key: bytes) -> Entry | None:
        row = self._row.get(key)
        return None if row is None else Entry(*self._table[row].tolist()[2:])

    def entries(self) -> Iterator[tuple[bytes, Entry]]:
        for row in self._rows.tolist():
            yield bytes(row[0]), Entry(*row[2:])

    @property
    def _rows(self) -> np.ndarray:
        return self._table[: len(self._row)]

    @property
    def prompts(self) -> int:
        return int(np.count_nonzero(self._rows["units"]))

    @property
    def most_visits(self) -> int:
        return int(self._rows["units"].max(initial=0))

    def total(self, column: str) -> int:
        """Sum ``bytes``, ``tokens`` or ``responses`` over the kept visits."""
        return int(self._rows[column].sum())

    @property
    def kept_share(self) -> float:
        """Share of the known prompts that are kept; 1 if none is known."""
        return self.prompts / len(self) if len(self) else 1.0

    @property
    def level(self) -> float:
        return self._full + self._cut

    def record(self, key: bytes, entry: Entry) -> None:
        row = self._row.setdefault(key, len(self._row))
        if row == len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self._table[row] = (np.void(key), place(key), *entry)
        self.changed.add(key)

    def note_visit(self, key: bytes, epoch: int, visit: int, size: float, step: int) -> None:
        """Note that a prompt was seen; the bytes of its new responses estimate the size of a prompt that is not kept.

        The responses of one visit may come in several parts, each in its step; a repeated step does not count again.
        """
        self.now = epoch
        if key in self:
            return
        before = self.get(key)
        if before is None or before.visit != visit:
            self.record(key, Entry(epoch, size, step=step, visit=visit))
        elif step > before.step:
            self.record(key, Entry(epoch, before.size + size, step=step, visit=visit))

    def set_level(self) -> None:
        """Set the level at which all known prompts fit, each with the visits that the level allows."""
        table = self._rows
        counts = ~self._gone(table) & (table["size"] <= self.bound)
        sizes, places = table["size"][counts], table["place"][counts]
        whole = float(sizes.sum())
        if whole * self.epochs <= self.bound:
            self._full, self._cut = self.epochs, 0.0
            return
        self._full = int(self.bound // whole)
        order = np.argsort(places)
        fits = int(np.searchsorted(np.cumsum(sizes[order]), self.bound - self._full * whole, side="right"))
        self._cut = float(places[order[fits]]) if fits < len(order) else 1.0

    def allowed_visits(self, key: bytes) -> int:
        """Return the number of visits that the level keeps of a known prompt; 0: do not write the prompt."""
        row = self._table[self._row[key]]
        if row["size"] > self.bound:
            return 0
        return min(self.epochs, self._full + int(row["place"] < self._cut))

    def excess(self, bound: int) -> dict[bytes, int]:
        """Return the prompts to shorten until the rest takes at most ``bound`` bytes, with the visits they keep.

        Prompts that are gone from the data come first, then the highest ranks. Its visits count as equally large.
        """
        table = self._rows
        over = self.total("bytes") - bound
        left: dict[int, int] = {}
        if over <= 0:
            return {}
        gone = np.flatnonzero(self._gone(table) & (table["units"] > 0))
        for row in gone[np.argsort(table["epoch"][gone], kind="stable")]:
            if over <= 0:
                break
            over -= int(table["bytes"][row])
            left[int(row)] = 0
        for unit in range(self.most_visits - 1, -1, -1):
            if over <= 0:
                break
            rows = np.flatnonzero(table["units"] > unit)
            for row in rows[np.argsort(-table["place"][rows])]:
                if over <= 0:
                    break
                if left.get(int(row)) != 0:
                    over -= math.ceil(table["bytes"][row] / table["units"][row])
                    left[int(row)] = unit
        return {table["key"][row].tobytes(): units for row, units in left.items()}

    def evict(self, key: bytes) -> None:
        """Note that a prompt is no longer kept; its size stays known."""
        entry = self.get(key)
        assert entry is not None
        self.record(key, entry.emptied())

    def drop_gone(self) -> None:
        """Drop the entries of prompts that are evicted and gone from the data."""
        table = self._rows
        for key in table["key"][self._gone(table) & (table["units"] == 0)]:
            self._drop(key.tobytes())

    def _drop(self, key: bytes) -> None:
        self.changed.add(key)
        row, last = self._row.pop(key), len(self._row)
        if row != last:  # keep the table dense
            self._table[row] = self._table[last]
            self._row[self._table["key"][row].tobytes()] = row

    def _gone(self, table: np.ndarray) -> np.ndarray:
        """A prompt that was not seen for whole epochs is gone from the data."""
        return self.now - table["epoch"] > max(_PATIENCE, self.epochs)
