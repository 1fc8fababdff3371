"""The history of prompts with 16 responses of real lengths, 8k and 32k tokens: what recording costs a prompt.

    python -m benchmarks.real_sizes history [--json] [--quick] [--tokens 8192 ...] [--prompts N] [--threads N]

The store alone, without TransferQueue and Ray (``benchmarks.studies.recording`` has those, and what a step waits):
epochs of made responses are appended, snapshotted, rewritten (what is kept is copied into a dense file) and restored
into another folder; each in a process of its own, whose peak of memory of its own (not of mapped files, which the
kernel takes back as it likes) is watched every 5 ms, and so is the disk that it takes beyond what it found. From the
fifth epoch on a prompt's history has its size: four epochs, one of which goes. Responses are made of phrases, most of
which their prompt has in other responses, too, as reasoning about one problem has; one token in twenty is another.

Last, one prompt is read: the fastest of many reads from a warm map, and of its parts: unpacking, and the checksum.

The seconds of an earlier commit: this file in the place of its own.
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
SAMPLES, EPOCHS = 16, 4
NAMESPACE = "benchmark"
#: A prompt's phrases, their mean tokens, and which tokens are others.
PHRASES, PHRASE_TOKENS, OTHERS = 3000, 6, 0.05


def key(prompt: int) -> bytes:
    return prompt.to_bytes(16, "big")


def responses(prompt: int, epoch: int, tokens: int) -> list[Trajectory]:
    """16 of one prompt, of ``tokens`` each on average; phrases and ids fall off as a language's do."""
    phrases = np.random.default_rng(prompt)
    lengths = phrases.geometric(1 / PHRASE_TOKENS, PHRASES)
    words = _ids(phrases, int(lengths.sum()))
    starts = np.cumsum(lengths) - lengths
    made = []
    for sample in range(SAMPLES):
        rng = np.random.default_rng([prompt, sample, epoch])
        length = max(1, int(rng.uniform(0.5, 1.5) * tokens))
        said = np.minimum(rng.pareto(0.7, 16 + length // 2) * 3, PHRASES - 1).astype(np.int64)
        within = np.arange(lengths[said].sum()) - np.repeat(np.cumsum(lengths[said]) - lengths[said], lengths[said])
        text = np.resize(words[np.repeat(starts[said], lengths[said]) + within], length)
        text = np.where(rng.random(length) < OTHERS, _ids(rng, length), text).astype(np.int32)
        logprobs = -rng.exponential(0.3, length).astype(np.float32)
        made.append(Trajectory(key(prompt), text, float(sample % 2), epoch, epoch, sample, logprobs))
    return made


def _ids(rng: np.random.Generator, count: int) -> np.ndarray:
    return np.minimum(rng.pareto(0.6, count) * 20, VOCABULARY - 1).astype(np.int32)


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


def record(folder: Path, bound: int, prompts: int, tokens: int, threads: int | None) -> Iterator[dict[str, Any]]:
    """Epoch by epoch, all prompts in one append; making the responses is not timed."""
    given = {} if threads is None else {"threads": threads}  # earlier commits have none
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
    """``snapshot``, ``rewrite`` or ``restore``."""
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
    """One prompt's history."""
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


def apart(part: str, *given: Any) -> list[dict[str, Any]]:
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
    quick: Annotated[bool, typer.Option(help="one prompt, of 8k")] = False,
    tokens: Annotated[list[int] | None, typer.Option(help="of a response, on average")] = None,
    prompts: Annotated[int | None, typer.Option(help="by default so many that they have 8 million tokens")] = None,
    threads: Annotated[int | None, typer.Option(help="that index; by default the store's own number")] = None,
) -> None:
    """Record, snapshot, rewrite, restore and read; a line for each. 4 GB of disk at most."""
    for each in tokens or ((8192,) if quick else (8192, 32_768)):
        count = prompts or (1 if quick else max(1, (1 << 17) // each))
        # Room for all, and as much for what an append writes before it frees.
        bound = max(1 << 24, count * SAMPLES * (EPOCHS + 1) * 40 * each)
        about = {"benchmark": "real_sizes", "part": "history", "prompts": count, "samples": SAMPLES}
        about |= {"vocabulary": VOCABULARY, "tokens_a_response": each, "threads": threads}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            jobs: list[tuple[Any, ...]] = [("record", folder, bound, count, each, threads)]
            jobs += [("move", folder, bound, what) for what in ("snapshot", "rewrite", "restore")]
            jobs += [("read", folder)]
            for job in jobs:
                for found in apart(*job):
                    row = {**about, **found, "machine": describe(), "commit": commit()}
                    print(json.dumps(row) if as_json else row, flush=True)
