"""Inject faults into real runs and check that each sample is trained exactly once.

    python -m benchmarks.faults [--json] [--quick] [--runs N] [--repeats N] [--out DIR] [KIND ...]

Real verl, vLLM and GRPO on the tiny world: separate engines, three replicas, weights by the relay, the presets
``stream`` and ``full``. During a run, processes are harmed at random times, several at once. A run that ends early is
started again. Each run's row comes from its event log and metrics: whether each sample was trained once, within the
staleness bound, with the tokens that the engines generated, and what the log reported of each fault.

``kill`` kills a replica's server process or its engine process. ``hang`` stops one of them for good. ``slow`` stops a
replica's engine for four fifths of each second, for some seconds. ``relay`` kills the relay of weights. ``trainer``
kills the trainer's process; the run then ends.

``--out`` keeps the rows. A second start skips finished runs, so ``--runs 1`` adds one run. A run that was terminated
(SIGTERM, as from ``timeout``) resumes from its last checkpoint.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from benchmarks import tiny_run
from benchmarks.machine import about, print_row
from benchmarks.real_run import Cell, Kept, faults, requests_of, short
from benchmarks.tiny_run import RHYME, ROLLOUT
from verl_rhyme.observability import metrics, steps
from verl_rhyme.trainer import replicas
from verl_rhyme.weights import manager

REPLICAS, BATCH, SAMPLES, SLOTS, LIMIT, PROMPTS, EPOCHS = 3, 6, 4, 6, 384, 24, 3
STEADY_MS, TRAIN_MS, HUNG_S, SAVED = 60.0, 60.0, 20.0, 2
#: Faults of each kind in a run that lasts long enough.
WANTED = {"kill": 3, "hang": 2, "slow": 2, "relay": 3, "trainer": 2}
STALE, STARTS, PRESETS = 1, 8, ("stream", "full")
#: Prefixes of the process titles that Ray and vLLM set.
TITLES = {
    "server": "ray::RhymeHttpServer",
    "engine": "VLLM::EngineCore",
    "relay": "ray::Relay",
    "trainer": "ray::TaskRunnerV1",
}
#: Seconds of a slow engine, and the share of each second in which it is stopped.
_SPAN_S, _STOPPED = 8.0, 0.8
#: Seconds between two faults; the shortest makes several almost simultaneous.
_PAUSES_S = (0.3, 3.0, 8.0)
#: Seconds that a hung process may outlive the log line about its replica.
_LINGER_S = 20.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def _pattern(line: str) -> re.Pattern[str]:
    """Return a pattern for a log format."""
    return re.compile(".+?".join(map(re.escape, re.split(r"%[.\d]*[dfs]", line))))


#: Log lines that report a fault of these kinds, and that of a new replica.
_REPORTS = {("kill", "hang"): _pattern(replicas.GONE), ("relay",): _pattern(manager.GONE)}
_REPLACED = _pattern(replicas.REPLACED)


# ---- processes of a run ----


def processes(run: Path, kind: str) -> list[psutil.Process]:
    """Return the processes of this run only: they have inherited its environment."""
    titled = (process for process in psutil.process_iter() if _title(process).startswith(TITLES[kind]))
    return [process for process in titled if _is_of(process, run)]


def end(run: Path) -> None:
    """Kill the remaining processes of a run."""
    for process in psutil.process_iter():
        if process.pid != psutil.Process().pid and _is_of(process, run):
            with suppress(psutil.Error):
                process.kill()


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _is_of(process: psutil.Process, run: Path) -> bool:
    with suppress(psutil.Error):
        return process.environ().get("RUN_DIR") == str(run)
    return False


def _written_since(file: Path, when: float) -> bool:
    return file.exists() and file.stat().st_size > 0 and file.stat().st_mtime > when


# ---- faults ----


@dataclass
class Injection:
    """One fault."""

    kind: str
    process: str  # key of TITLES
    at: float  # seconds since the epoch
    reported_after_s: float | None = None  # until the log reported it; of trainer, until the run ended
    ended_first: bool = False  # the run ended before the log reported the fault
    outlived: bool = False  # a hung process still ran after its replica was given up


class Injector:
    """Injector of faults into a run, from its first step until its end or until all faults are injected. It keeps a
    record in the run's folder, and resumes from it.

    Args:
        run: ``RUN_DIR``.
        wanted: Number of faults of each kind.
        seed: Seed of times and victims.
    """

    def __init__(self, run: Path, wanted: Mapping[str, int], seed: int) -> None:
        self._run, self._record = run, record_of(run)
        kept = json.loads(self._record.read_text()) if self._record.exists() else {}
        self.done = [Injection(**each) for each in kept.get("done", ())]
        self.replaced: int = kept.get("replaced", 0)
        self.ends: list[str] = kept.get("ends", [])  # error of each start that failed
        self.seconds: float = kept.get("seconds", 0.0)  # of all starts
        self._rng = random.Random(f"{seed} {len(self.done)}")
        self._deck = sorted((Counter(wanted) - Counter(each.kind for each in self.done)).elements())
        self._rng.shuffle(self._deck)
        self._down: set[int] = set()  # servers of dead or hung replicas
        self._hung: list[tuple[psutil.Process, Injection]] = []
        self._slow: tuple[psutil.Process, float] | None = None  # the process, and the end of its slow time
        self._lock, self._over = threading.Lock(), threading.Event()
        self._log, self._metrics = run / "train.log", run / "metrics.jsonl"
        self._read = self._log.stat().st_size if self._log.exists() else 0
        self._next, self._started = 0.0, time.time()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._loop, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def ended(self, how: str = "") -> None:
        """Record that the run ended, with the error of a failed one; it may start again."""
        self._follow()
        with self._lock:
            for injection in self.done:
                if injection.kind == "trainer" and injection.reported_after_s is None:
                    injection.reported_after_s = round(time.time() - injection.at, 1)
                elif injection.reported_after_s is None and injection.kind != "slow":
                    injection.ended_first = True
            self._down, self._hung, self._slow = set(), [], None
            self.seconds += time.time() - self._started
            self._started = time.time()
            self.ends += [how] * bool(how)
            if self._run.is_dir():
                kept = {"replaced": self.replaced, "ends": self.ends, "seconds": self.seconds}
                self._record.write_text(json.dumps({"done": [asdict(each) for each in self.done], **kept}))

    def figures(self) -> dict[str, Any]:
        """Return the part of a run's row that is about its faults."""

        def count(done: Iterable[Injection]) -> Counter[str]:
            return Counter(each.kind for each in done)

        reported = [each for each in self.done if each.reported_after_s is not None]
        return {
            "seconds": round(self.seconds),
            "ends": len(self.ends),
            "replaced": self.replaced,
            "injected": count(self.done),
            "reported": count(reported),
            "ended_first": count(each for each in self.done if each.ended_first),
            "reported_after_s": {
                kind: [each.reported_after_s for each in reported if each.kind == kind] for kind in count(self.done)
            },
            "processes": Counter(f"{each.kind} {each.process}" for each in self.done),
            "outlived": sum(each.outlived for each in self.done),
        }

    # ---- the thread ----

    def _loop(self) -> None:
        while not self._over.wait(0.1):
            self._follow()
            with self._lock, suppress(psutil.Error):
                self._pulse()
                self._inject()

    def _follow(self) -> None:
        """Read the new lines of the log."""
        if not self._log.exists():
            return
        with self._lock, self._log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._read += len(data)
            for line in data.decode(errors="replace").splitlines():
                self._read_line(line)

    def _read_line(self, line: str) -> None:
        self.replaced += bool(_REPLACED.search(line))
        for kinds, pattern in _REPORTS.items():
            if not pattern.search(line):
                continue
            open_ = [i for i in self.done if i.kind in kinds and i.reported_after_s is None and not i.ended_first]
            hangs = "no answer for" in line  # else its process has ended
            for injection in ([i for i in open_ if (i.kind == "hang") == hangs] or open_)[:1]:
                injection.reported_after_s = round(time.time() - injection.at, 1)

    def _pulse(self) -> None:
        now = time.time()
        if self._slow is not None:
            process, until = self._slow
            process.send_signal(signal.SIGSTOP if now < until and now % 1.0 < _STOPPED else signal.SIGCONT)
            if now >= until:
                self._slow = None
        for process, injection in self._hung:
            after = injection.reported_after_s
            if after is not None and now > injection.at + after + _LINGER_S:
                injection.outlived = process.is_running() and process.status() != psutil.STATUS_ZOMBIE

    def _inject(self) -> None:
        if time.time() < self._next or not _written_since(self._metrics, self._started):
            return
        for place, kind in enumerate(self._deck):
            if (victim := self._victim(kind)) is not None:
                self._harm(kind, *victim)
                del self._deck[place]
                self._next = time.time() + self._rng.choice(_PAUSES_S)
                return

    def _victim(self, kind: str) -> tuple[str, psutil.Process] | None:
        """Return a process for a fault, or ``None`` if there is none; one replica is spared to continue the run."""
        saved = self._run / "checkpoints" / "latest_checkpointed_iteration.txt"
        if kind == "trainer" and not _written_since(saved, self._started):
            return None
        if kind in ("relay", "trainer"):
            found = processes(self._run, kind)
            return (kind, self._rng.choice(found)) if found else None
        pairs = []
        for server in processes(self._run, "server"):
            engines = [child for child in server.children(recursive=True) if _title(child).startswith(TITLES["engine"])]
            starts = ".launch_server" in _title(server)  # Ray puts an actor's current method into the title
            if not starts and server.pid not in self._down and engines:
                pairs.append((server, engines[0]))
        pairs = [pair for pair in pairs if self._slow is None or pair[1] != self._slow[0]]
        if not pairs or (kind != "slow" and len(pairs) < 2) or (kind == "slow" and self._slow is not None):
            return None
        server, engine = self._rng.choice(sorted(pairs, key=lambda pair: pair[0].pid))
        if kind == "slow":
            return "engine", engine
        self._down.add(server.pid)
        name = self._rng.choice(["server", "engine"])
        return name, server if name == "server" else engine

    def _harm(self, kind: str, name: str, process: psutil.Process) -> None:
        injection = Injection(kind, name, time.time())
        self.done.append(injection)
        if kind == "hang":
            process.suspend()
            self._hung.append((process, injection))
        elif kind == "slow":
            self._slow = process, time.time() + _SPAN_S
        else:
            process.kill()


def record_of(run: Path) -> Path:
    """Return the file with the faults of a run."""
    return run / "injections.json"


# ---- a run ----


def cells(kinds: Sequence[str], repeats: int) -> list[Cell]:
    """Return the runs in their order."""
    return [Cell(preset, ", ".join(kinds), seed) for seed in range(1, 1 + repeats) for preset in PRESETS]


def train(cell: Cell, folder: Path, wanted: dict[str, int], epochs: int) -> dict[str, Any]:
    """Make a run with faults until it finishes. Return the figures of its faults."""
    if not record_of(folder).exists():
        shutil.rmtree(folder, ignore_errors=True)
    settings = {"RHYME": cell.setting, "REPLICAS": str(REPLICAS), "MODE": "separate_async"}
    settings |= {"EPOCHS": str(epochs), "PROMPTS": str(PROMPTS), "SEED": str(cell.seed)}
    overrides = [
        *tiny_run.sizes(BATCH, SAMPLES, SLOTS, 1),
        *(f"trainer.save_freq={SAVED}", f"{RHYME}.scheduling.lost_after={HUNG_S}"),
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={SAMPLES}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={SAMPLES}",
    ]
    injector = Injector(folder, wanted, cell.seed)
    try:
        with injector.running():
            for _ in range(STARTS):
                try:
                    tiny_run.train(folder, settings, overrides, STEADY_MS, timeout=900, train_ms=TRAIN_MS)
                    break
                except subprocess.CalledProcessError:
                    injector.ended(last_words(folder.parent / f"{folder.name}.log"))
            else:
                raise RuntimeError(f"{folder} did not finish in {STARTS} starts: {injector.ends}")
    except BaseException:
        end(folder)
        injector.ended("terminated")
        raise
    injector.ended()
    return injector.figures()


def last_words(log: Path) -> str:
    """Return the last lines of a failed run's log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-400:]


def measure(cell: Cell, folder: Path, injected: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Return the row of a run: its samples and its faults."""
    by_step = dict(sorted(steps.from_metrics(folder / "metrics.jsonl").items()))
    requests, samples, wanted = requests_of(folder), BATCH * SAMPLES, epochs * PROMPTS // BATCH
    checked = faults(requests, by_step, samples, LIMIT, STALE)
    thrown = ~requests["trained"] & ~requests["validate"]
    correlation = [row["training/rollout_actor_probs_pearson_corr"] for row in by_step.values()]
    return {
        "setting": cell.setting,
        "arm": cell.arm,
        "seed": cell.seed,
        "steps": wanted,
        "steps_logged": len(by_step),
        "samples": samples,
        **injected,
        "thrown_away_tokens": int(requests["response_tokens"][thrown].sum()),
        "trained_tokens": int(requests["response_tokens"][requests["trained"]].sum()),
        "early_share": short(float(np.mean([row.get(metrics.EARLY_SHARE, 0.0) for row in by_step.values()]))),
        "pearson_least": short(float(min(correlation))),
        "spanning": checked["spanning"],
        "faults": [*checked["faults"], *not_once(requests, wanted, epochs, PROMPTS * SAMPLES)],
    }


def not_once(requests: Mapping[str, np.ndarray], wanted_steps: int, epochs: int, of_epoch: int) -> list[str]:
    """Return messages about samples that are missing or were trained twice; ``of_epoch`` samples are expected."""
    rows, messages = np.flatnonzero(requests["trained"]), []
    if (steps_of := np.unique(requests["step"][rows]).tolist()) != list(range(1, wanted_steps + 1)):
        messages.append(f"steps {sorted({*range(1, wanted_steps + 1)} ^ {*steps_of})} are missing or unexpected")
    trained_in: dict[tuple[str, int], set[int]] = {}
    by_epoch: dict[int, Counter[tuple[str, int]]] = {epoch: Counter() for epoch in range(epochs)}
    for row in rows.tolist():
        uid, number = str(requests["uid"][row]), int(requests["sample"][row])
        seen = trained_in.setdefault((uid, number), set())
        if not seen:
            key = str(requests["prompt_key"][row]), number
            by_epoch.setdefault(int(requests["epoch"][row]), Counter())[key] += 1
        seen.add(int(requests["step"][row]))
    messages += [f"{uid}-{n} in steps {sorted(seen)}" for (uid, n), seen in trained_in.items() if len(seen) > 1]
    for epoch, counts in by_epoch.items():
        twice = sum(count - 1 for count in counts.values())
        if twice or len(counts) != of_epoch:
            messages.append(f"epoch {epoch}: {of_epoch - len(counts)} samples lost, {twice} trained twice")
    return messages


# ---- output ----


def totals(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over all runs."""
    rows = list(rows)
    summed = {
        name: sum((Counter(row[name]) for row in rows), Counter[str]())
        for name in ("injected", "reported", "ended_first")
    }
    return {"total": True, "runs": len(rows), **summed, "faults": sum(len(row["faults"]) for row in rows)}


def _line(row: dict[str, Any]) -> str:
    name = "all" if row.get("total") else f"{row['setting']}, seed {row['seed']}"
    injected = ", ".join(f"{kind} {count}" for kind, count in row["injected"].items())
    return f"{name}: {injected or 'nothing injected'}; faults: {row['faults'] or 'none'}"


@app.command()
def main(
    kinds: Annotated[list[str] | None, typer.Argument(help="default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="one short run (five minutes)")] = False,
    runs: Annotated[int | None, typer.Option(help="maximum number of new runs; 0: only print finished runs")] = None,
    repeats: Annotated[int, typer.Option(help="runs of each preset")] = 5,
    out: Annotated[Path, typer.Option(help="folder of the runs")] = Path("runs/faults"),
) -> None:
    """Train with faults, check the runs, print their rows."""
    chosen = kinds or list(WANTED)
    if unknown := sorted(set(chosen) - set(WANTED)):
        raise typer.BadParameter(f"unknown kind {'; '.join(unknown)}; known: {'; '.join(WANTED)}")
    wanted = cells(chosen, repeats)[: 1 if quick else None]
    epochs = 2 if quick else EPOCHS
    each = {kind: 1 if quick else count for kind, count in WANTED.items() if kind in chosen}
    out.mkdir(parents=True, exist_ok=True)
    origin = about("faults")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a run's processes end with this one

    def make(cell: Cell) -> dict[str, Any]:
        folder = cell.folder(out)
        return {**origin, **measure(cell, folder, train(cell, folder, each, epochs), epochs)}

    shown = Kept(out).complete(wanted, runs, make, lambda row: as_json or print(_line(row), flush=True))
    if shown is not None:
        for row in [*(shown if as_json else []), {**origin, **totals(shown)}]:
            print_row(row, as_json, _line(row))


if __name__ == "__main__":
    app()
