"""Rows of a part that this process has: what one stage fetched from TransferQueue the next does not fetch again.

verl fetches all fields of all rows for every stage, on every rank. A part's rows stay here from its first stage to its
last; the trainer asks for what is new and says so beside the data (:mod:`verl_rhyme.trainer.fetching`). Actor and
reference are two workers in one process, and the rows are the process's.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu

#: Beside the data of a stage: they are to be kept, ``{"part": its number, "fields": their names}``; or, with a part's
#: number, they are what is new of it, to join what was kept.
KEEP, JOIN = "rhyme_keep", "rhyme_join"


class HeldRows:
    """See the module; one in each process (:data:`ROWS`).

    Attributes:
        fetched, reused: Bytes of tensors that stages were given, and that they had already, since the last
            :meth:`counts`.
    """

    def __init__(self) -> None:
        self._part: int | None = None
        self._rows: TensorDict | None = None
        self.fetched = self.reused = 0

    def joined(self, data: TensorDict) -> TensorDict:
        """What a stage was sent, with what was kept of these rows.

        Raises:
            RuntimeError: Other rows are here, or none.
        """
        keep, join = tu.pop(data, key=KEEP), tu.pop(data, key=JOIN)
        if keep is None and join is None:
            return data
        self.fetched += sum(map(_bytes, data.values()))
        if keep is not None:
            self._part, self._rows = keep["part"], data.select(*keep["fields"], strict=False)
            return data
        rows = self._rows
        if rows is None or self._part != join or len(rows) != len(data):
            raise RuntimeError(f"rows of part {self._part} are here, and part {join} of {len(data)} is asked for")
        there = set(data.keys())
        for name, column in rows.items():
            if name not in there:
                data[name] = column
                self.reused += _bytes(column)
        return data

    def drop(self) -> None:
        """Nobody asks for these rows any more."""
        self._part = self._rows = None

    def counts(self) -> tuple[int, int]:
        """Bytes that were fetched, and reused, since the last call."""
        told = self.fetched, self.reused
        self.fetched = self.reused = 0
        return told


#: This process's.
ROWS = HeldRows()


def _bytes(value: Any) -> int:
    """Of the tensors in it, by rows; strings and the like are small, and so is what is one for all rows."""
    if isinstance(value, torch.Tensor):
        return (value.values().nbytes + value.offsets().nbytes) if value.is_nested else value.nbytes
    if isinstance(value, NonTensorStack):
        return sum(map(_bytes, value.tolist()))
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return 0
