"""A history with less room than prompts, under reshuffled epochs: what is hit, what is written, what the ledger costs.

    python -m benchmarks.studies.eviction [--json] [--quick]

The real store (LMDB) is given small prompts, whose lengths change by a fifth from pass to pass, for several passes over
reshuffled data, with room for 20, 40 and 80 % of them (and for 150 %, with four epochs asked for); a hit is a prompt
that has a history when it arrives. The part "bookkeeping" times what a step of 512 prompts costs the ledger, without
values, at 17,398 prompts (DAPO-Math) and at a million. The part "large values" drives the store with values of
megabytes. Recorded rows of "oldest first" are of a model of the store's earlier policy.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import commit, describe
from verl_rhyme.config import HISTORY_FILL
from verl_rhyme.history.record import Trajectory, encoded_bytes
from verl_rhyme.history.retention import Entry, Retention
from verl_rhyme.history.store import HistoryReader, HistoryStore
from verl_rhyme.history.values import stored_bytes

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

NAMESPACE = "benchmark"
PAGE = 4096
VOCABULARY = 152_064


def key(prompt: int) -> bytes:
    return int(prompt).to_bytes(16, "big")


def value_bytes(tokens: int) -> int:
    """Of the file, of one response."""
    return stored_bytes(encoded_bytes(tokens, 1, VOCABULARY - 1))


def schedule(prompts: int, passes: int, batch: int, seed: int) -> Iterator[tuple[int, np.ndarray]]:
    """(epoch, prompts of a step), reshuffled in every epoch."""
    rng = np.random.default_rng(seed)
    for epoch in range(passes):
        for step in np.array_split(rng.permutation(prompts), max(1, prompts // batch)):
            yield epoch, step


def lengths(prompts: int, mean: int) -> np.ndarray:
    """int[prompts], log-normal, as response lengths are."""
    drawn = np.random.default_rng(7).lognormal(0.0, 0.5, prompts)
    return np.maximum(1, drawn / drawn.mean() * mean).astype(int)


def varied(tokens: np.ndarray, epoch: int) -> np.ndarray:
    """int[prompts], this pass's lengths."""
    noise = np.random.default_rng(epoch).lognormal(-0.02, 0.2, len(tokens))
    return np.maximum(1, tokens * noise).astype(int)


def by_hash(share: float, tokens: np.ndarray, passes: int, batch: int, seed: int, epochs: int = 1) -> dict[str, Any]:
    """The store."""
    room = share * sum(value_bytes(int(n)) for n in tokens)
    hits: dict[int, list[bool]] = {}
    written = evicted = shed = rewrites = 0
    seconds = []
    with (
        tempfile.TemporaryDirectory() as folder,
        HistoryStore(folder, NAMESPACE, int(room / HISTORY_FILL) + PAGE, epochs) as store,
    ):
        reader = HistoryReader(folder, NAMESPACE, refresh_interval=0.0)
        present = None
        for number, (epoch, step) in enumerate(schedule(len(tokens), passes, batch, seed)):
            hits.setdefault(epoch, []).extend(reader.get(key(i)) is not None for i in step)
            length = varied(tokens, epoch)
            made = [np.full(length[i], VOCABULARY - 1 - number % 1000, np.int32) for i in step]
            batch_of = [Trajectory(key(i), t, 0.0, 0, epoch, 0) for i, t in zip(step, made, strict=True)]
            started = time.perf_counter()
            stats = store.append(batch_of, number)
            seconds.append(time.perf_counter() - started)
            written, evicted, shed = written + stats.prompts, evicted + stats.evicted, shed + stats.shed_epochs
            assert stats.dropped == 0
            environment = (Path(folder) / "current").read_text()
            rewrites += present is not None and environment != present
            present = environment
        kept = store.stats()
        reader.close()
    each = len(tokens) * passes
    return {
        "hits": hits,
        "written": written / each,
        "evicted": evicted / each,
        "shed_epochs": shed / each,
        "rewrites": rewrites,
        "kept_share": round(kept["kept_share"], 4),
        "epochs_kept": round(kept["responses"] / max(1, kept["prompts"]), 3),
        "filled": round(kept["bytes"] / room, 4),
        "step_ms": round(float(np.median(seconds)) * 1e3, 2),
    }


def bookkeeping(prompts: int, steps: int, batch: int = 512) -> dict[str, float]:
    """Milliseconds of a step's ledger with room for 40 % of the prompts, all of them known."""
    rng = np.random.default_rng(0)
    size = lengths(prompts, 8_000_000).astype(float)
    ledger = Retention(int(0.4 * size.sum()), 4)
    for i in range(prompts):
        ledger.record(key(i), Entry(0, size[i]))
    ledger.set_level()
    for i in range(prompts):
        if ledger.allowed_visits(key(i)):
            ledger.record(key(i), Entry(0, size[i], 1, int(size[i]), 16 * 8000, 16))
    seconds = []
    for number in range(steps):
        step = rng.integers(0, prompts, batch)
        started = time.perf_counter()
        for i in step:
            ledger.note_visit(key(i), 1, 1, size[i] * rng.uniform(0.8, 1.25), number)
        ledger.drop_gone()
        ledger.set_level()
        for i in step:
            if ledger.allowed_visits(key(i)):
                grown = size[i] * rng.uniform(0.8, 1.25)
                ledger.record(key(i), Entry(1, grown, 1, int(grown), 16 * 8000, 16))
            elif key(i) in ledger:
                ledger.evict(key(i))
        for k, left in ledger.excess(ledger.bound).items():
            assert left == 0
            ledger.evict(k)
        assert ledger.total("bytes") <= ledger.bound, number
        seconds.append(time.perf_counter() - started)
    return {"ledger_ms": round(float(np.median(seconds)) * 1e3, 2), "worst_ms": round(max(seconds) * 1e3, 2)}


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Hit rates by epoch, and their mean after the first one."""
    hits = found.pop("hits")
    by_epoch = [round(float(np.mean(hits[epoch])), 4) for epoch in sorted(hits)]
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}
    return {"hit_rate": round(float(np.mean(by_epoch[1:])), 4), "by_epoch": by_epoch, **rounded}


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="fewer prompts, no million")] = False,
) -> None:
    """Measure and print."""
    about = {"benchmark": "eviction", "machine": describe(), "commit": commit()}

    def show(arm: str, setting: dict[str, Any], found: dict[str, Any]) -> None:
        row = {"arm": arm, **setting, **found}
        print(json.dumps({**about, **row}) if as_json else row, flush=True)

    prompts, passes, batch = (400, 4, 16) if quick else (2000, 6, 64)
    tokens = lengths(prompts, 2000)
    for share in (0.2, 0.4, 0.8):
        for seed in (1,) if quick else (1, 2, 3):
            setting = {"part": "hits", "prompts": prompts, "room": share, "epochs": 1, "seed": seed}
            show("by hash (store)", setting, summary(by_hash(share, tokens, passes, batch, seed)))
    setting = {"part": "hits", "prompts": prompts, "room": 1.5, "epochs": 4, "seed": 1}
    show("by hash (store)", setting, summary(by_hash(1.5, tokens, passes, batch, 1, epochs=4)))
    large = lengths(40 if quick else 200, 110_000)  # values of a megabyte
    setting = {"part": "large values", "prompts": len(large), "room": 0.4, "epochs": 1, "seed": 1}
    show("by hash (store)", setting, summary(by_hash(0.4, large, 3 if quick else 6, 4, 1)))
    for known in (17_398,) if quick else (17_398, 1_000_000):
        show("by hash (ledger)", {"part": "bookkeeping", "prompts": known}, bookkeeping(known, 5 if quick else 20))


if __name__ == "__main__":
    app()
