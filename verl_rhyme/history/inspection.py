"""Inspection of a history's contents, for ``verl-rhyme history`` and other readers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_rhyme.history import environment
from verl_rhyme.history.environment import Environment
from verl_rhyme.history.record import CorruptRecord, PromptHistory


@dataclass
class Inspection:
    """Contents of one store or snapshot."""

    folder: str
    namespace: str  # fingerprint of the vocabulary
    bytes: int  # of the file
    prompts: int = 0
    responses: int = 0
    tokens: int = 0
    corrupt: int = 0  # prompts with a damaged value


def find(path: Path) -> Iterator[Path]:
    """Yield the environments below a history folder, checkpoint or snapshot, by the numbers in their names.

    Raises FileNotFoundError without any.
    """
    current = environment.current(path)
    if current is not None:
        yield current
        return
    found = [file.parent for file in path.rglob(environment.DATA_FILE)]
    found.sort(key=lambda folder: re.sub("[0-9]+", lambda number: number[0].zfill(20), str(folder)))
    if not found:
        raise FileNotFoundError(f"{path} holds no history; pass a history folder, or a checkpoint's global_step_N")
    yield from found


def inspect(folder: Path) -> Inspection:
    """Read one environment without disturbing a running writer; CorruptEnvironment if it is damaged."""
    with environment.open_to_inspect(folder) as opened:
        size = (folder / environment.DATA_FILE).stat().st_size
        result = Inspection(str(folder), opened.namespace(), size)
        for _, history in _histories(opened):
            if history is None:
                result.corrupt += 1
                continue
            result.prompts += 1
            result.responses += len(history)
            result.tokens += int(history.lengths.sum())
    return result


def lengths(folder: Path) -> dict[bytes, np.ndarray]:
    """Return the response lengths in tokens by prompt key, int32[m], oldest first; damaged prompts are left out."""
    with environment.open_to_inspect(folder) as opened:
        return {key: history.lengths for key, history in _histories(opened) if history is not None}


def _histories(opened: Environment) -> Iterator[tuple[bytes, PromptHistory | None]]:
    with opened.env.begin(db=opened.prompts, buffers=True) as txn:
        for key, value in txn.cursor():
            try:
                yield bytes(key), PromptHistory.decode(bytearray(value))
            except CorruptRecord:
                yield bytes(key), None
