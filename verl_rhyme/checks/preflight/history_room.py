"""Size of a run's history, and the part of it that fits into the configured room."""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import ListConfig

from verl_rhyme.checks.doctor import OK, WARN, Check
from verl_rhyme.checks.preflight import machine_checks
from verl_rhyme.checks.preflight.estimate import gib
from verl_rhyme.checks.preflight.machine import can_write
from verl_rhyme.config import HISTORY_FILL, ConfigError, config_tree
from verl_rhyme.history.share import available_memory

#: Bytes of a stored token, and further bytes of a response, in the format of ``history/record.py``. A token has 18 bits
#: for one of 262,143 ids, 20 for its position among a million tokens, and 8 for its probability.
TOKEN_BYTES, RESPONSE_BYTES = 5.75, 27

#: Disk space in units of ``history.max_bytes``: the file, and a second copy of its values during a rewrite
#: (``history/values.py``).
PEAK = 1 + HISTORY_FILL

#: Seconds for reading prompts, to find repeated ones.
_COUNTING_S = 10.0

#: Assumed range of the mean response length, as shares of ``data.max_response_length``; a run has no lengths before it
#: starts.
MEAN_SHARES = (1 / 8, 1 / 2)
_RANGE = "1/8 to 1/2 of max_response_length"


@dataclass(frozen=True)
class Need:
    """Size of the history at one mean response length.

    Attributes:
        tokens: Mean response length.
        epoch: Bytes of one visit of all prompts.
        epochs: Visits of each prompt to keep.
    """

    tokens: int
    epoch: int
    epochs: int

    @property
    def all(self) -> int:
        """Bytes of all visits."""
        return self.epoch * self.epochs

    def kept(self, bound: int) -> str:
        """Return text on the part that a store of ``bound`` bytes keeps."""
        level = self.level(bound)
        if level >= self.epochs:
            return "all"
        return f"{level:.1f} of {self.epochs} visits" if level >= 1 else f"{level:.0%} of the prompts"

    def level(self, bound: int) -> float:
        """Return the visits of all prompts that fit; below 1, the share of prompts whose latest visit fits."""
        return min(float(self.epochs), bound * HISTORY_FILL / self.epoch)


def needs(prompts: int, samples: int, longest: int, epochs: int) -> tuple[Need, Need]:
    """Return the sizes at both ends of :data:`MEAN_SHARES`."""

    def need(share: float) -> Need:
        tokens = max(1, round(share * longest))
        return Need(tokens, int(prompts * samples * (TOKEN_BYTES * tokens + RESPONSE_BYTES)), epochs)

    low, high = map(need, MEAN_SHARES)
    return low, high


def check(config: Any) -> tuple[list[Check], tuple[int, int]]:
    """Check prompts x samples x mean length x visits against ``history.max_bytes`` and the disk of this machine.

    Returns:
        Findings, and bytes of the history's copy in a checkpoint once all visits are kept, at both ends of
        :data:`MEAN_SHARES`: 0 without a history or with an unknown number of prompts.
    """
    name, history_dir = "history store", Path(machine_checks.history_dir(config) or tempfile.gettempdir())
    try:
        tree = config_tree.from_verl(config)
    except ConfigError:  # the check of the rhyme tree reports it
        tree = None
    if tree is None or not can_write(history_dir):  # the check of the history folder reports the latter
        return [], (0, 0)
    checks = []
    folder, free = machine_checks.free_disk(history_dir)
    bound = tree.history.bound(free, available_memory())
    where = f"{folder}: {gib(free)} free, history.max_bytes {gib(bound)}"
    if tree.history.max_bytes is None:
        where += " (null: the smaller of half the free disk and half the free memory)"
    peak = int(PEAK * bound)
    where += f", {gib(peak)} while it is rewritten"
    if free < peak:
        remedy = "free disk space, set history.dir to a folder on another disk, or lower history.max_bytes"
        checks.append(Check(name, WARN, where, remedy))
        bound = int(free / PEAK)
    counted = _prompts(config)
    if counted is None:
        return [*checks, Check(name, OK, f"{where}; the number of prompts is unknown on this machine")], (0, 0)
    visits = math.ceil(counted.rows / counted.prompts * int(config.trainer.total_epochs))  # per prompt in the run
    epochs = max(1, min(tree.history.epochs, visits))
    samples, longest = int(config.actor_rollout_ref.rollout.n), int(config.data.max_response_length)
    low, high = needs(counted.prompts, samples, longest, epochs)
    copied = min(low.all, int(bound * HISTORY_FILL)), min(high.all, int(bound * HISTORY_FILL))
    repeated = f" (in {counted.rows} rows)" if counted.rows > counted.prompts else ""
    kept = " to ".join(dict.fromkeys((low.kept(bound), high.kept(bound))))
    detail = (
        f"{counted.prompts} prompts{repeated} x {samples} responses x {low.tokens} to {high.tokens} tokens ({_RANGE}) "
        f"x {epochs} visits = {gib(low.all)} to {gib(high.all)} on the trainer's node, up to {gib(copied[1])} of it in "
        f"each checkpoint; kept: {kept}. {where}"
    )
    if high.level(bound) >= 1:
        checks.append(Check(name, OK, detail))
    else:
        one, whole = (gib(size / HISTORY_FILL) for size in (high.epoch, high.all))
        remedy = f"set history.max_bytes to {one} for one visit of all prompts, to {whole} for all visits, or accept it"
        checks.append(Check(name, WARN, detail, remedy))
    return checks, copied


@dataclass
class _Counted:
    """Counts of the prompts in the training files.

    Attributes:
        rows: Rows per epoch.
        prompts: Distinct prompts among the rows, or an upper bound if counting takes too long.
    """

    rows: int = 0
    prompts: int = 0


def _prompts(config: Any) -> _Counted | None:
    """Count the prompts of the training files; ``None`` if a file cannot be read on this machine."""
    import pyarrow
    import pyarrow.parquet as pq

    data, counted = config.data, _Counted()
    listed = data.get("train_files") or []
    seen: set[int] = set()
    deadline = time.monotonic() + _COUNTING_S
    for file in listed if isinstance(listed, list | tuple | ListConfig) else [listed]:
        path = Path(str(file)).expanduser()
        if "://" in str(file) or path.suffix != ".parquet" or not path.is_file():
            return None
        try:
            with pq.ParquetFile(path) as opened:
                rows = opened.metadata.num_rows
                counted.rows += rows
                names = set(opened.schema_arrow.names)
                column = str(data.get("prompt_key") or "prompt")
                media = {str(data.get(f"{kind}_key") or f"{kind}s") for kind in ("image", "video", "audio")}
                if column not in names or media & names:  # comparing images would read too much data
                    counted.prompts += rows
                else:
                    counted.prompts += _distinct(opened, column, seen, deadline)
        except (OSError, pyarrow.ArrowException):
            return None  # the check of the datasets reports it
    most = int(data.get("train_max_samples") or -1)
    if 0 < most < counted.rows:
        counted = _Counted(most, min(most, counted.prompts))
    return counted if counted.rows else None


def _distinct(file: Any, column: str, seen: set[int], deadline: float) -> int:
    """Return the number of prompts of a file that are not in ``seen``, by the texts of their messages.

    After the deadline, the remaining rows count at the rate of new prompts in the last batch that was read.
    """
    import pyarrow as pa

    before, read, new = len(seen), 0, 0.0
    for batch in file.iter_batches(batch_size=1 << 15, columns=[column]):
        texts, messages, known = batch.column(0), None, len(seen)
        if pa.types.is_list(texts.type) or pa.types.is_large_list(texts.type):
            messages = texts.offsets.to_numpy()
            texts = texts.values
        if pa.types.is_struct(texts.type) and texts.type.get_field_index("content") >= 0:
            texts = texts.field("content")
        if not pa.types.is_string(texts.type):
            seen.update(hash(repr(row)) for row in batch.column(0).to_pylist())
        else:
            ends = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
            ends = (ends if messages is None else ends[messages]).tolist()
            words = (texts.buffers()[2] or pa.py_buffer(b"")).to_pybytes()
            seen.update(hash(words[start:end]) for start, end in pairwise(ends))
        read, new = read + len(batch), (len(seen) - known) / len(batch)
        if time.monotonic() > deadline:
            break
    return len(seen) - before + math.ceil(new * (file.metadata.num_rows - read))
