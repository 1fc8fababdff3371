"""Which prompts, and how many of their visits, fit into a number of bytes: shallower first, then fewer prompts.

A visit is one group of responses to a prompt: one an epoch, or many where the data repeat a prompt. Each prompt has a
fixed place in [0, 1), a hash of its key. Its latest visit ranks at ``place``, the one before at ``1 + place``, and so
on; what ranks below one number, the level, is kept. A level of 2.3 keeps three visits of 30 % of the prompts and two of
the others; one of 0.4 keeps the latest visit of 40 % of the prompts, always the same ones: under reshuffled epochs,
room for a share C of the prompts is hit C of the time (oldest first: about C*C/2, since what goes comes back soonest).
A prompt above the level is not written, but its size is remembered, so that the level follows the sizes of all prompts,
down and up.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

#: Epochs of the data that must have passed a prompt by before it counts as gone, at least.
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
    """What is known of a prompt without its value.

    Attributes:
        epoch: The pass over the data that it was last seen in.
        size: Bytes of one visit of it: the mean of those kept, or what its latest one would have taken.
        units: Visits kept; 0: it has no room, and the next three are 0.
        bytes, tokens, responses: Kept.
        step: The latest one that recorded it, or would have.
        visit: Label of its latest visit; -1 where none is known.
    """

    epoch: int
    size: float
    units: int = 0
    bytes: int = 0
    tokens: int = 0
    responses: int = 0
    step: int = -1
    visit: int = -1

    def emptied(self) -> Entry:
        """What stays known when nothing is kept."""
        return Entry(self.epoch, self.size, step=self.step, visit=self.visit)


def place(key: bytes) -> float:
    """In [0, 1): where a prompt stands in the order of going."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big") / (1 << 48)


class Room:
    """The ledger of a store: about 70 bytes a prompt, and as much for Python's index of the keys.

    Args:
        bound: Bytes that values may fill.
        epochs: Visits of a prompt that are kept where there is room for all.
    """

    def __init__(self, bound: int, epochs: int) -> None:
        self.bound, self.epochs = bound, epochs
        self._row: dict[bytes, int] = {}
        self._table = np.zeros(64, _COLUMNS)
        #: The epoch that arrives.
        self.now = 0
        self._full, self._cut = epochs, 0.0

    # ---- what is known ----

    def __contains__(self, key: bytes) -> bool:
        """Whether anything is kept of a prompt."""
        row = self._row.get(key)
        return row is not None and bool(self._table["units"][row])

    def entry(self, key: bytes) -> Entry:
        """Raises: KeyError: It was never seen."""
        return Entry(*self._table[self._row[key]].tolist()[2:])

    def entries(self) -> Iterator[tuple[bytes, Entry]]:
        """All that is known."""
        for row in self._known.tolist():
            yield bytes(row[0]), Entry(*row[2:])

    @property
    def _known(self) -> np.ndarray:
        return self._table[: len(self._row)]

    @property
    def known(self) -> int:
        """Prompts seen lately, with and without room."""
        return len(self._row)

    @property
    def prompts(self) -> int:
        """Prompts of which anything is kept."""
        return int(np.count_nonzero(self._known["units"]))

    @property
    def deepest(self) -> int:
        """The most visits that any prompt has."""
        return int(self._known["units"].max(initial=0))

    def total(self, column: str) -> int:
        """Sum of ``bytes``, ``tokens`` or ``responses`` over what is kept."""
        return int(self._known[column].sum())

    @property
    def kept_share(self) -> float:
        """Prompts kept of those known; 1 where none is known."""
        return self.prompts / self.known if self.known else 1.0

    @property
    def level(self) -> float:
        """See the module; ``epochs`` where there is room for all."""
        return self._full + self._cut

    # ---- what happens ----

    def record(self, key: bytes, entry: Entry) -> None:
        """What is now known of a prompt."""
        row = self._row.setdefault(key, len(self._row))
        if row == len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self._table[row] = (np.void(key), place(key), *entry)

    def arrive(self, key: bytes, epoch: int, visit: int, size: float, step: int) -> None:
        """A prompt is seen; what its new responses would take is the best guess of a prompt that is not kept.

        Args:
            epoch: Pass over the data.
            visit: Label of the visit.
            size: Bytes of its new responses; those of one visit may come in several parts.
            step: That of the part; one that comes again does not count again.
        """
        self.now = epoch
        if key in self:
            return
        before = self.entry(key) if key in self._row else None
        if before is None or before.visit != visit:
            self.record(key, Entry(epoch, size, step=step, visit=visit))
        elif step > before.step:
            self.record(key, Entry(epoch, before.size + size, step=step, visit=visit))

    def settle(self) -> None:
        """Find the level at which all known prompts fit, each with as many visits as the level gives it."""
        table = self._known
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

    def epochs_for(self, key: bytes) -> int:
        """How many visits of a prompt the level keeps; 0: it is not to be written.

        Raises: KeyError: It was never seen.
        """
        row = self._table[self._row[key]]
        if row["size"] > self.bound:
            return 0
        return min(self.epochs, self._full + int(row["place"] < self._cut))

    def excess(self, bound: int) -> dict[bytes, int]:
        """What has to go until the rest takes at most ``bound`` bytes: prompt to the visits that it keeps.

        Prompts that are gone from the data go first, then the highest ranks. Sizes within a prompt are taken as equal.
        """
        table = self._known
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
        for unit in range(self.deepest - 1, -1, -1):
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
        """Nothing is kept of a prompt any more; its size stays known."""
        self.record(key, self.entry(key).emptied())

    def forget(self) -> list[bytes]:
        """Drop what has no room and has not been seen for epochs. Returns the keys."""
        table = self._known
        keys = [key.tobytes() for key in table["key"][self._gone(table) & (table["units"] == 0)]]
        for key in keys:
            self.drop(key)
        return keys

    def drop(self, key: bytes) -> None:
        """Know nothing of a prompt any more.

        Raises: KeyError: It was never seen.
        """
        row, last = self._row.pop(key), len(self._row)
        if row != last:  # the last one takes its row
            self._table[row] = self._table[last]
            self._row[self._table["key"][row].tobytes()] = row

    def _gone(self, table: np.ndarray) -> np.ndarray:
        """Whole epochs passed it by: the data has changed."""
        return self.now - table["epoch"] > max(_PATIENCE, self.epochs)
