"""Rows of a part that this process holds, so that later stages do not fetch them from TransferQueue again.

verl fetches all fields of all rows for every stage, on every rank. Here a part's rows stay from its first stage to its
last; the trainer requests only new fields and marks the data (:mod:`verl_rhyme.trainer.fetching`). Actor and reference
are two workers in one process, and share the rows.
"""

from __future__ import annotations

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

#: Keys in a stage's data. KEEP, ``{"part": number, "fields": names}``: keep these fields of the part. JOIN, a part's
#: number: the data are new fields of that part, to be joined with the rows kept.
KEEP, JOIN = "rhyme_keep", "rhyme_join"


class HeldRows:
    """Store of a part's rows, one in each process (:data:`ROWS`)."""

    def __init__(self) -> None:
        self._part: int | None = None
        self._rows: TensorDict | None = None

    def join(self, data: TensorDict) -> TensorDict:
        """Return the data of a stage, joined with the rows kept, which must be of its part."""
        keep, join = tu.pop(data, key=KEEP), tu.pop(data, key=JOIN)
        if keep is None and join is None:
            return data
        if keep is not None:
            self._part, self._rows = keep["part"], data.select(*keep["fields"], strict=False)
            return data
        rows = self._rows
        if rows is None or self._part != join or len(rows) != len(data):
            raise RuntimeError(f"rows of part {self._part} are kept, but part {join} of {len(data)} rows is requested")
        present = set(data.keys())
        for name, column in rows.items():
            if name not in present:
                data[name] = column
        return data

    def drop(self) -> None:
        self._part = self._rows = None


#: The rows of this process.
ROWS = HeldRows()
