"""The history at the size of DAPO-Math: 17,398 prompts x 16 responses, shorter ones than there, so that they fit here.

    python -m benchmarks.real_sizes history [--json] [--quick]

The store alone, without TransferQueue and Ray (``benchmarks.recording`` has those): epochs of made responses are
appended in steps of 512 prompts, then snapshotted, rewritten (what is kept is copied into a dense file) and restored
into another folder; each in a process of its own, whose peak of memory of its own (not of mapped files, which the
kernel takes back as it likes) is watched every 5 ms, and so is the disk that it takes beyond what it found. A tenth of
a response's tokens is new in the second epoch.

Last, one prompt of 500k tokens is read (four epochs of 16 responses): the fastest of many reads from a warm map, and of
its parts: unpacking, and the value's checksum.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import commit, describe
from verl_rhyme.history import packing
from verl_rhyme.history.record import PromptHistory, Trajectory
from verl_rhyme.history.store import HistoryReader, HistoryStore

VOCABULARY = 152_064
PROMPTS, SAMPLES, STEP = 17_398, 16, 512
NAMESPACE = "benchmark"
READ_TOKENS = 500_000


def key(prompt: int) -> bytes:
    return prompt.to_bytes(16, "big")


def responses(prompt: int, epoch: int, tokens: int) -> list[Trajectory]:
    """16 of one prompt, of ``tokens`` each on average; ids fall off as a language's do."""
    made = []
    for sample in range(SAMPLES):
        rng = np.random.default_rng([prompt, sample])
        length = max(1, int(rng.uniform(0.5, 1.5) * tokens))
        text = np.minimum(rng.pareto(0.6, length) * 20, VOCABULARY - 1).astype(np.int32)
        if epoch:
            other = np.random.default_rng([prompt, sample, epoch]).integers(0, VOCABULARY, length)
            text = np.where(rng.random(length) < 0.1, other, text).astype(np.int32)
        logprobs = -rng.exponential(0.3, length).astype(np.float32)
        made.append(Trajectory(key(prompt), text, float(sample % 2), epoch, epoch, sample, logprobs))
    return made


class Watch:
    """Peaks of this process's own memory and of a folder's files while it is open, bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._ended = folder, threading.Event()
        self.disk = self.memory = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._before, self._stood = self._own(), used(self._folder)
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self._began
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.005):
            self.memory = max(self.memory, self._own() - self._before)
            self.disk = max(self.disk, used(self._folder) - self._stood)

    @staticmethod
    def _own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def used(folder: Path) -> int:
    """Bytes on the disk; files that go meanwhile are left out."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_blocks * 512
        except OSError:
            continue
    return total


def record(folder: Path, bound: int, prompts: int, tokens: int, epoch: int) -> Iterator[dict[str, Any]]:
    """One epoch, step by step; making the responses is not timed."""
    seconds, made = 0.0, 0
    with HistoryStore(folder / "store", NAMESPACE, bound, 4) as store:
        order = np.random.default_rng(epoch).permutation(prompts)
        for step, chosen in enumerate(np.split(order, range(STEP, prompts, STEP))):
            batch = [t for prompt in chosen.tolist() for t in responses(prompt, epoch, tokens)]
            made += sum(len(t.tokens) for t in batch)
            with Watch(folder) as watch:
                stats = store.append(batch, epoch * 1_000_000 + step)
            seconds += watch.seconds
            assert stats.dropped == 0, stats
        told = store.stats()
    yield {
        "arm": f"record epoch {epoch + 1}",
        "seconds": round(seconds, 1),
        "tokens_a_second": int(made / seconds),
        "tokens": told["tokens"],
        "kept_share": round(told["kept_share"], 3),
        "bytes_a_token": round(told["bytes"] / told["tokens"], 3),
        "file_bytes_a_token": round(told["file_bytes"] / told["tokens"], 3),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def move(folder: Path, bound: int, what: str) -> Iterator[dict[str, Any]]:
    """``snapshot``, ``rewrite`` or ``restore``."""
    at = folder / ("restored" if what == "restore" else "store")
    with HistoryStore(at, NAMESPACE, bound, 4) as store:
        calls: dict[str, Callable[[], Any]] = {
            "snapshot": lambda: store.snapshot(folder / "snapshot"),
            "rewrite": lambda: store._rewrite(1 << 50),
            "restore": lambda: store.restore(folder / "snapshot"),
        }
        with Watch(folder) as watch:
            calls[what]()
        values = store.stats()["bytes"]
    yield {
        "arm": what,
        "seconds": round(watch.seconds, 2),
        "value_bytes": values,
        "peak_memory_mib": round(watch.memory / (1 << 20), 1),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "peak_disk_taken_to_values": round(watch.disk / values, 2),
    }


def read(folder: Path, tokens: int) -> Iterator[dict[str, Any]]:
    """One prompt's history."""
    each = tokens // (4 * SAMPLES)
    bound = max(1 << 20, 40 * tokens)
    with HistoryStore(folder / "one", NAMESPACE, bound, 4) as store:
        for epoch in range(4):
            store.append(responses(1, epoch, each), epoch)
        reader = HistoryReader(folder / "one", NAMESPACE)
        history = reader.get(key(1))
        assert history is not None
        value = history.encode()
        width = packing.width_of(int(history.tokens.max()) + 1)
        packed = packing.pack(history.tokens + np.int32(1), width)
        count = len(history.tokens)
        calls: dict[str, Callable[[], Any]] = {
            "read_us": lambda: reader.get(key(1)),
            "decode_us": lambda: PromptHistory.decode(value),
            "unpack_tokens_us": lambda: packing.unpack(packed, count, width, -1),
            "checksum_us": lambda: zlib.crc32(value),
        }
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(100):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - began)
        reader.close()
    yield {
        "arm": "read one prompt",
        "tokens": count,
        "bytes_a_token": round(len(value) / count, 3),
        **{name: round(1e6 * seconds) for name, seconds in best.items()},
    }


PARTS = {"record": record, "move": move, "read": read}


def _run(queue: Any, part: str, *given: Any) -> None:
    for row in PARTS[part](*given):
        queue.put(row)


def apart(part: str, *given: Any) -> dict[str, Any]:
    """A part in a process of its own, so that its peaks are its own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_run, args=(queue, part, *given))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{part} {given} ended with {process.exitcode}")
    return queue.get(timeout=10)


def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="a fiftieth of the prompts")] = False,
    tokens: Annotated[int, typer.Option(help="of a response, on average")] = 256,
    epochs: Annotated[int, typer.Option(help="that are recorded, one after another")] = 2,
) -> None:
    """Record, snapshot, rewrite, restore and read; a line for each. 4 GB of disk at most."""
    prompts = PROMPTS // 50 if quick else PROMPTS
    # Room for all, in values of whole pages, and half as much for what a step writes before it frees.
    bound = max(1 << 24, prompts * (SAMPLES * 2 * epochs * 7 * tokens + 4096 * 2))
    about = {"benchmark": "real_sizes", "part": "history", "prompts": prompts, "samples": SAMPLES}
    about |= {"vocabulary": VOCABULARY, "tokens_a_response": tokens}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs: list[tuple[Any, ...]] = [("record", folder, bound, prompts, tokens, epoch) for epoch in range(epochs)]
        jobs += [("move", folder, bound, what) for what in ("snapshot", "rewrite", "restore")]
        jobs += [("read", folder, READ_TOKENS // 10 if quick else READ_TOKENS)]
        for job in jobs:
            row = {**about, **apart(*job), "machine": describe(), "commit": commit()}
            print(json.dumps(row) if as_json else row, flush=True)
