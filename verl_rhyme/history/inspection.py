"""Inspection of a history's contents, for ``verl-rhyme history`` and other readers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from verl_rhyme.history import environment
from verl_rhyme.history.record import CorruptRecord, PromptHistory


@dataclass
class Inspection:
    """Contents of one store or snapshot.

    Attributes:
        folder: Folder of the environment.
        namespace: Fingerprint of the vocabulary.
        bytes: Size of the file.
        prompts, responses, tokens: Numbers of kept prompts, responses and tokens.
        corrupt: Number of prompts with a damaged value.
    """

    folder: str
    namespace: str
    bytes: int
    prompts: int = 0
    responses: int = 0
    tokens: int = 0
    corrupt: int = 0


def find(path: Path) -> Iterator[Path]:
    """Yield the environments below a history folder, checkpoint or snapshot, by the numbers in their names.

    Damaged environments that were set aside are skipped.

    Raises:
        FileNotFoundError: There is no environment.
    """
    current = environment.current(path)
    if current is not None:
        yield current
        return
    found = [file.parent for file in path.rglob(environment.DATA_FILE) if "corrupt-" not in str(file.parent)]
    found.sort(key=lambda folder: re.sub("[0-9]+", lambda number: number[0].zfill(20), str(folder)))
    if not found:
        raise FileNotFoundError(f"{path} holds no history; pass a history folder, or a checkpoint's global_step_N")
    yield from found


def inspect(folder: Path) -> Inspection:
    """Read one environment without disturbing a running writer.

    Raises:
        environment.Damaged: The environment is damaged.
    """
    with _opened(folder) as (env, prompts, namespace):
        result = Inspection(str(folder), namespace, (folder / environment.DATA_FILE).stat().st_size)
        with env.begin(db=prompts, buffers=True) as txn:
            for _, value in txn.cursor():
                try:
                    history = PromptHistory.decode(bytearray(value))
                except CorruptRecord:
                    result.corrupt += 1
                    continue
                result.prompts += 1
                result.responses += len(history)
                result.tokens += int(history.lengths.sum())
    return result


def lengths(folder: Path) -> dict[bytes, np.ndarray]:
    """Return the response lengths in tokens by prompt key, int32[m], oldest first; damaged prompts are left out.

    Raises:
        environment.Damaged: The environment is damaged.
    """
    found: dict[bytes, np.ndarray] = {}
    with _opened(folder) as (env, prompts, _), env.begin(db=prompts, buffers=True) as txn:
        for key, value in txn.cursor():
            with contextlib.suppress(CorruptRecord):
                found[bytes(key)] = PromptHistory.decode(bytearray(value)).lengths
    return found


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[tuple[lmdb.Environment, Any, str]]:
    """Open a store or snapshot; yields its environment, the prompts' database and the namespace."""
    if (folder / "lock.mdb").exists():
        opened = environment.acquire(folder)
        try:
            yield opened.env, opened.prompts, opened.namespace()
        finally:
            environment.release(opened)
        return
    environment.check(folder)
    namespace = str(json.loads((folder / "meta.json").read_text())["namespace"])
    env = lmdb.open(str(folder), readonly=True, lock=False, max_dbs=3)
    try:
        yield env, env.open_db(b"prompts", create=False), namespace
    finally:
        env.close()
