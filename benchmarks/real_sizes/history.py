"""Measure the history store with 16 responses per prompt of real lengths, 8k and 32k tokens.

    python -m benchmarks.real_sizes history [--json] [--quick] [--tokens 8192 ...] [--prompts N] [--threads N]

Measures only the store, without TransferQueue and Ray. Epochs of synthetic responses are appended, snapshotted,
rewritten (kept data is copied into a dense file) and restored into another folder. Each operation has a process. Every
5 ms it samples the process's anonymous memory (without mapped files, which the kernel can reclaim) and the additional
disk space. From the fifth epoch on a prompt's history has constant size: four epochs, the oldest evicted. Responses
consist of phrases. A prompt's responses share most phrases, as reasoning about one problem does; one token in twenty
differs.

Finally one prompt is read: the fastest of many reads from a warm map, and its parts: unpacking, and the checksum.

To measure an earlier commit, copy this file over that commit's.
"""

from __future__ import annotations

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

from benchmarks.machine import print_row
from verl_rhyme.history import packing
from verl_rhyme.history.reader import HistoryReader
from verl_rhyme.history.record import PromptHistory, Trajectory
from verl_rhyme.history.store import HistoryStore

VOCABULARY = 152_064
SAMPLES, EPOCHS = 16, 4
NAMESPACE = "benchmark"
#: Number of a prompt's phrases, their mean tokens, and the share of differing tokens.
PHRASES, PHRASE_TOKENS, OTHERS = 3000, 6, 0.05


def key(prompt: int) -> bytes:
    return prompt.to_bytes(16, "big")


def responses(prompt: int, epoch: int, tokens: int) -> list[Trajectory]:
    """Return 16 responses of one prompt with a mean of ``tokens``; frequencies of phrases and ids are heavy-tailed."""
    phrases = np.random.default_rng(prompt)
    lengths = phrases.geometric(1 / PHRASE_TOKENS, PHRASES)
    words = _ids(phrases, int(lengths.sum()))
    starts = np.cumsum(lengths) - lengths
    made = []
    for sample in range(SAMPLES):
        rng = np.random.default_rng([prompt, sample, epoch])
        length = max(1, int(rng.uniform(0.5, 1.5) * tokens))
        chosen = np.minimum(rng.pareto(0.7, 16 + length // 2) * 3, PHRASES - 1).astype(np.int64)
        within = np.arange(lengths[chosen].sum()) - np.repeat(
            np.cumsum(lengths[chosen]) - lengths[chosen], lengths[chosen]
        )
        text = np.resize(words[np.repeat(starts[chosen], lengths[chosen]) + within], length)
        text = np.where(rng.random(length) < OTHERS, _ids(rng, length), text).astype(np.int32)
        logprobs = -rng.exponential(0.3, length).astype(np.float32)
        made.append(Trajectory(key(prompt), text, float(sample % 2), epoch, epoch, sample, logprobs))
    return made


def _ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.minimum(rng.pareto(0.6, count) * 20, VOCABULARY - 1).astype(np.int32)


class Watch:
    """Peak bytes of this process's anonymous memory and of a folder's files while it is open."""

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
    """Return a folder's bytes on disk without files that vanish meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_blocks * 512
        except OSError:
            continue
    return total


def record(folder: Path, bound: int, prompts: int, tokens: int, threads: int | None) -> Iterator[dict[str, Any]]:
    """Record epoch by epoch, all prompts in one append; the creation of the responses is not timed."""
    given = {} if threads is None else {"threads": threads}  # earlier commits lack the option
    with HistoryStore(folder / "warm", NAMESPACE, 1 << 24, EPOCHS, **given) as store:
        for epoch in range(2):
            store.append(responses(0, epoch, 64), epoch)
    with HistoryStore(folder / "store", NAMESPACE, bound, EPOCHS, **given) as store:
        for epoch in range(EPOCHS + 2):
            batch = [t for prompt in range(prompts) for t in responses(prompt, epoch, tokens)]
            began, cpu = time.perf_counter(), time.process_time()
            stats = store.append(batch, epoch)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            assert stats.dropped == 0, stats
            stats = store.stats()
            yield {
                "arm": "record",
                "epoch": epoch + 1,
                "seconds_a_prompt": round(seconds / prompts, 4),
                "cpu_seconds_a_prompt": round(cpu / prompts, 4),
                "tokens_a_second": int(sum(len(t.tokens) for t in batch) / seconds),
                "kept_tokens_a_prompt": int(stats["tokens"] / prompts),
                "bytes_a_token": round(stats["bytes"] / stats["tokens"], 3),
                "file_bytes_a_token": round(stats["file_bytes"] / stats["tokens"], 3),
                "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
            }


def move(folder: Path, bound: int, what: str) -> Iterator[dict[str, Any]]:
    """Measure ``snapshot``, ``rewrite`` or ``restore``."""
    at = folder / ("restored" if what == "restore" else "store")
    with HistoryStore(at, NAMESPACE, bound, EPOCHS) as store:
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


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Measure the read of one prompt's history."""
    with HistoryStore(folder / "store", NAMESPACE, 1 << 40, EPOCHS):
        reader = HistoryReader(folder / "store", NAMESPACE)
        history = reader.get(key(0))
        assert history is not None
        value = history.encode()
        width = packing.width_of(int(history.tokens.max()) + 1)
        packed = packing.pack(history.tokens + np.int32(1), width)
        count = len(history.tokens)
        calls: dict[str, Callable[[], Any]] = {
            "read_us": lambda: reader.get(key(0)),
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
    queue.put(list(PARTS[part](*given)))


def in_process(part: str, *given: Any) -> list[dict[str, Any]]:
    """Run a part in a separate process, so that its peaks are separate."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_run, args=(queue, part, *given))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{part} {given} failed with status {process.exitcode}")
    return queue.get(timeout=10)


def main(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="one prompt with 8k tokens")] = False,
    tokens: Annotated[list[int] | None, typer.Option(help="mean tokens of a response")] = None,
    prompts: Annotated[int | None, typer.Option(help="default: prompts with 8 million tokens in total")] = None,
    threads: Annotated[int | None, typer.Option(help="indexing threads; default: the store's")] = None,
) -> None:
    """Record, snapshot, rewrite, restore and read; print a row for each. Needs up to 4 GB of disk."""
    for each in tokens or ((8192,) if quick else (8192, 32_768)):
        count = prompts or (1 if quick else max(1, (1 << 17) // each))
        # Room for all data, and again for an append, which writes before it frees.
        bound = max(1 << 24, count * SAMPLES * (EPOCHS + 1) * 40 * each)
        about = {"benchmark": "real_sizes", "part": "history", "prompts": count, "samples": SAMPLES}
        about |= {"vocabulary": VOCABULARY, "tokens_a_response": each, "threads": threads}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            jobs: list[tuple[Any, ...]] = [("record", folder, bound, count, each, threads)]
            jobs += [("move", folder, bound, what) for what in ("snapshot", "rewrite", "restore")]
            jobs += [("read", folder)]
            for job in jobs:
                for found in in_process(*job):
                    print_row({**about, **found}, as_json)
