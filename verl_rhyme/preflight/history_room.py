"""What a run's history will need, and how much of it the configured room will keep."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import ListConfig

from verl_rhyme import config_tree
from verl_rhyme.config import HISTORY_FILL, ConfigError
from verl_rhyme.doctor import OK, WARN, Check
from verl_rhyme.history.share import available_memory
from verl_rhyme.preflight import machine_checks
from verl_rhyme.preflight.estimate import gib

#: Bytes of a stored token and, beside them, of a response; ``history/record.py`` is the format. A token: 18 bits for
#: one of 262,143 ids, 20 for a place among a million tokens, 8 for its probability.
TOKEN_BYTES, RESPONSE_BYTES = 5.75, 27

#: Of ``history.max_bytes``, what the disk must have: the file, and once more its values while they are copied into the
#: next one (``history/eviction.py``).
PEAK = 1 + HISTORY_FILL

#: The mean length of a response cannot be known before a run: these shares of ``data.max_response_length`` are taken.
MEAN_SHARES = (1 / 8, 1 / 2)
_TOLD = "1/8 to 1/2 of max_response_length"


@dataclass(frozen=True)
class Need:
    """Bytes of values, at one mean length of a response.

    Attributes:
        tokens: The mean length.
        epoch: Bytes of one epoch of all prompts.
        epochs: Epochs that are to be kept.
    """

    tokens: int
    epoch: int
    epochs: int

    @property
    def all(self) -> int:
        """Bytes of all epochs."""
        return self.epoch * self.epochs

    def kept(self, bound: int) -> str:
        """What stays of it in a store of ``bound`` bytes, in words."""
        level = self.level(bound)
        if level >= self.epochs:
            return "all"
        return f"{level:.1f} of {self.epochs} epochs" if level >= 1 else f"{level:.0%} of the prompts"

    def level(self, bound: int) -> float:
        """Epochs of all prompts that fit; below 1, the share of the prompts whose latest one does."""
        return min(float(self.epochs), bound * HISTORY_FILL / self.epoch)


def needs(prompts: int, samples: int, longest: int, epochs: int) -> tuple[Need, Need]:
    """At both ends of :data:`MEAN_SHARES`."""

    def need(share: float) -> Need:
        tokens = max(1, round(share * longest))
        return Need(tokens, int(prompts * samples * (TOKEN_BYTES * tokens + RESPONSE_BYTES)), epochs)

    low, high = map(need, MEAN_SHARES)
    return low, high


def check(config: Any) -> Iterator[Check]:
    """Prompts x samples x mean length x epochs against ``history.max_bytes`` and the disk of this machine."""
    try:
        tree = config_tree.from_verl(config)
    except ConfigError:  # a finding of its own
        return
    if tree is None:
        return
    name = "history store"
    folder, free = machine_checks.free_disk(Path(machine_checks.history_dir(config) or tempfile.gettempdir()))
    bound = tree.history.bound(free, available_memory())
    where = f"{folder}: {gib(free)} free, history.max_bytes {gib(bound)}"
    if tree.history.max_bytes is None:
        where += " (null: half of free disk or memory, the smaller one)"
    peak = int(PEAK * bound)
    where += f", {gib(peak)} while it is rewritten"
    if free < peak:
        yield Check(name, WARN, where, "free some, set history.dir elsewhere, or lower history.max_bytes")
        bound = int(free / PEAK)
    prompts = _prompts(config)
    if not prompts:
        yield Check(name, OK, f"{where}; how many prompts there are is not known here")
        return
    samples, longest = int(config.actor_rollout_ref.rollout.n), int(config.data.max_response_length)
    epochs = max(1, min(tree.history.epochs, int(config.trainer.total_epochs)))
    low, high = needs(prompts, samples, longest, epochs)
    copied = gib(min(high.all, int(bound * HISTORY_FILL)))
    kept = " to ".join(dict.fromkeys((low.kept(bound), high.kept(bound))))
    detail = (
        f"{prompts} prompts x {samples} responses x {low.tokens} to {high.tokens} tokens ({_TOLD}) x {epochs} epochs "
        f"= {gib(low.all)} to {gib(high.all)} on the trainer's node, up to {copied} of it in each checkpoint; "
        f"kept: {kept}. {where}"
    )
    if high.level(bound) >= 1:
        yield Check(name, OK, detail)
    else:
        one, whole = (gib(size / HISTORY_FILL) for size in (high.epoch, high.all))
        remedy = f"for one epoch of all prompts set history.max_bytes to {one}, for all epochs {whole}; or accept it"
        yield Check(name, WARN, detail, remedy)


def _prompts(config: Any) -> int:
    """Rows of the training files that can be read here; 0 where one cannot."""
    import pyarrow
    import pyarrow.parquet as pq

    listed = config.data.get("train_files") or []
    rows = 0
    for file in listed if isinstance(listed, list | tuple | ListConfig) else [listed]:
        path = Path(str(file)).expanduser()
        if "://" in str(file) or path.suffix != ".parquet" or not path.is_file():
            return 0
        try:
            rows += pq.read_metadata(path).num_rows
        except (OSError, pyarrow.ArrowException):
            return 0  # a finding of its own
    most = int(config.data.get("train_max_samples") or -1)
    return min(rows, most) if most > 0 else rows
