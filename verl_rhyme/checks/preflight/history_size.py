"""Size of a run's history, and the part of it that fits into the configured room."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as pq
from omegaconf import OmegaConf

from verl_rhyme.checks.doctor import OK, WARN, Check, problems, verdict
from verl_rhyme.checks.preflight import machine_checks
from verl_rhyme.checks.preflight.estimate import gib
from verl_rhyme.checks.preflight.machine import OBJECT_STORE, can_write, object_store
from verl_rhyme.checks.preflight.plan import Plan, data_files
from verl_rhyme.config import HISTORY_FILL
from verl_rhyme.history import share

#: Bytes of a stored token, and further bytes of a response, in the format of ``history/record.py``. A token has 18 bits
#: for one of 262,143 ids, 20 for its position among a million tokens, and 8 for its probability.
TOKEN_BYTES, RESPONSE_BYTES = 5.75, 27

#: Disk space in units of ``history.max_bytes``: the file, and a second copy of its values during a rewrite
#: (``history/values.py``).
PEAK = 1 + HISTORY_FILL

#: Seconds for reading prompts, to find repeated ones.
_COUNTING_S = 2.0

#: Assumed range of the mean response length, as shares of ``data.max_response_length``; a run has no lengths before it
#: starts.
MEAN_SHARES = (1 / 8, 1 / 2)
_RANGE = "1/8 to 1/2 of max_response_length"


def check(config: Any, plan: Plan) -> tuple[list[Check], int]:
    """Check prompts x samples x mean length x visits against ``history.max_bytes`` and the disk of this machine.

    Also return the most bytes of the history's copy in a checkpoint: 0 without a history or with an unknown number of
    prompts.
    """
    name, rhyme = "history store", plan.rhyme
    history_dir = machine_checks.history_dir(plan)
    if rhyme is None or not can_write(history_dir):  # the check of the history folder reports the latter
        return [], 0
    folder, free = machine_checks.free_disk(history_dir)
    bound = rhyme.history.max_bytes or share.bound(
        history_dir, free, object_store(OmegaConf.select(config, OBJECT_STORE))
    )
    automatic = "" if rhyme.history.max_bytes else " (null: the smaller of half the free disk and half the free memory)"
    where = (
        f"{folder}: {gib(free)} free, history.max_bytes {gib(bound)}{automatic}, {gib(int(PEAK * bound))} while it is "
        "rewritten"
    )
    remedy = "free disk space, set history.dir to a folder on another disk, or lower history.max_bytes"
    checks = problems(name, (free < PEAK * bound, where, remedy), status=WARN)
    bound = min(bound, int(free / PEAK))
    if (counted := _count_prompts(config)) is None:
        return [*checks, Check(name, OK, f"{where}; the number of prompts is unknown on this machine")], 0
    rows, prompts = counted
    visits = math.ceil(rows / prompts * int(config.trainer.total_epochs))  # per prompt in the run
    epochs = max(1, min(rhyme.history.epochs, visits))
    samples, longest = int(config.actor_rollout_ref.rollout.n), int(config.data.max_response_length)
    tokens = [max(1, round(share * longest)) for share in MEAN_SHARES]
    low, high = (int(prompts * samples * (TOKEN_BYTES * mean + RESPONSE_BYTES)) for mean in tokens)  # of one visit
    room = int(bound * HISTORY_FILL)
    kept = " to ".join(dict.fromkeys(f"{min(epochs, room / visit):.1f}" for visit in (low, high)))
    detail = (
        f"{prompts} prompts x {samples} responses x {tokens[0]} to {tokens[1]} tokens ({_RANGE}) x {epochs} visits = "
        f"{gib(low * epochs)} to {gib(high * epochs)} on the trainer's node, up to {gib(min(high * epochs, room))} of "
        f"it in each checkpoint; kept: {kept} of {epochs} visits. {where}"
    )
    remedy = (
        f"set history.max_bytes to {gib(high / HISTORY_FILL)} for one visit of all prompts, to "
        f"{gib(high * epochs / HISTORY_FILL)} for all visits, or accept it"
    )
    return [*checks, verdict(name, room >= high, detail, remedy, WARN)], min(high * epochs, room)


def _count_prompts(config: Any) -> tuple[int, int] | None:
    """Return rows and distinct prompts of an epoch; ``None`` if a file cannot be read here. Prompts are extrapolated if
    counting takes too long; with images, videos or audio they are as many as rows.
    """
    data = config.data
    rows = prompts = 0
    seen: set[int] = set()
    deadline = time.monotonic() + _COUNTING_S
    column = str(data.get("prompt_key") or "prompt")
    media = {str(data.get(f"{kind}_key") or f"{kind}s") for kind in ("image", "video", "audio")}
    for file in data_files(config, "train_files"):
        path = Path(file).expanduser()
        if path.suffix != ".parquet" or not path.is_file():
            return None
        try:
            with pq.ParquetFile(path) as opened:
                rows += opened.metadata.num_rows
                names = set(opened.schema_arrow.names)
                compare = column in names and not media & names
                prompts += _distinct(opened, column, seen, deadline) if compare else opened.metadata.num_rows
        except (OSError, pyarrow.ArrowException):
            return None  # the check of the datasets reports it
    most = int(data.get("train_max_samples") or -1)
    if 0 < most < rows:
        rows, prompts = most, min(most, prompts)
    return (rows, prompts) if rows else None


def _distinct(file: Any, column: str, seen: set[int], deadline: float) -> int:
    """Return the number of a file's prompts that are not in ``seen``; rows after the deadline count at the rate of new
    prompts in the last batch that was read.
    """
    before, read, new = len(seen), 0, 0.0
    for batch in file.iter_batches(batch_size=1 << 15, columns=[column]):
        known = len(seen)
        seen.update(hash(repr(row)) for row in batch.column(0).to_pylist())
        read, new = read + len(batch), (len(seen) - known) / len(batch)
        if time.monotonic() > deadline:
            break
    return len(seen) - before + math.ceil(new * (file.metadata.num_rows - read))
