"""Inject faults into the processes of a real run at random times, and read the run's log about each.

``kill`` kills a replica's server process or its engine process. ``hang`` stops one of them for good. ``slow`` stops a
replica's engine for four fifths of each second, for some seconds. ``relay`` kills the relay of weights. ``trainer``
kills the trainer's process; the run then ends, and the benchmark starts it again.
"""

from __future__ import annotations

import json
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from verl_rhyme.agent_loop.client import MOVED
from verl_rhyme.coordinator import replicas
from verl_rhyme.weights import manager


def _pattern(line: str) -> re.Pattern[str]:
    """Return a pattern for a log format, with a group for each of its values."""
    return re.compile("(.+?)".join(map(re.escape, re.split(r"%[.\d]*[dfs]", line))))


#: File in the run's folder.
KEPT = "injections.json"
#: Prefixes of the process titles that Ray and vLLM set.
TITLES = {
    "server": "ray::RhymeHttpServer",
    "engine": "VLLM::EngineCore",
    "relay": "ray::Relay",
    "trainer": "ray::TaskRunnerV1",
}
#: Log lines that report a fault of these kinds.
REPORTS = {"replica": _pattern(replicas.GONE), "relay": _pattern(manager.GONE)}
REPLACED, _KEPT = _pattern(replicas.REPLACED), _pattern(MOVED)
_SPAN_S, _PULSE_S, _STOPPED = 8.0, 1.0, 0.8
#: Seconds between two faults; the shortest makes several almost simultaneous.
_PAUSES_S = (0.3, 3.0, 8.0)
#: Seconds that a hung process may outlive the log line about its replica.
_LINGER_S = 20.0


def processes(run: Path, kind: str) -> list[psutil.Process]:
    """Return the processes of this run only: they have inherited its environment."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or [])
        if title.startswith(TITLES[kind]) and _is_of(process, run):
            found.append(process)
    return found


def end(run: Path) -> None:
    """Kill the remaining processes of a run."""
    for process in psutil.process_iter():
        if process.pid != psutil.Process().pid and _is_of(process, run):
            with suppress(psutil.Error):
                process.kill()


def _is_of(process: psutil.Process, run: Path) -> bool:
    try:
        return process.environ().get("RUN_DIR") == str(run)
    except psutil.Error:
        return False


@dataclass
class Injection:
    """One fault.

    Attributes:
        kind: A kind of the module's docstring.
        process: A name of :data:`TITLES`.
        at: Seconds since the epoch.
        reported_after_s: Seconds until the log reported the fault; for ``trainer``, until the run ended. ``None``: not.
        ended_first: The run ended before the log reported the fault.
        outlived: A hung process still ran after its replica was given up.
    """

    kind: str
    process: str
    at: float
    reported_after_s: float | None = None
    ended_first: bool = False
    outlived: bool = False


def redispatched(log: str) -> dict[str, Any]:
    """Return counts of requests that moved to another replica after a death, from the log: their number, the tokens
    that they kept, and the seconds of generation lost with the replica."""
    found = _KEPT.findall(log)
    return {
        "redispatched": len(found),
        "kept_tokens": sum(int(tokens) for _, tokens, _, _ in found),
        "kept_some": sum(int(tokens) > 0 for _, tokens, _, _ in found),
        "lost_request_s": round(sum(float(seconds) for _, _, seconds, _ in found), 1),
    }


class Injector:
    """Injector of faults into a run, from its first step until its end or until all faults are injected. It keeps a
    record in the run's folder, and resumes from it.

    Args:
        run: ``RUN_DIR``.
        wanted: Number of faults of each kind.
        seed: Seed of times and victims.
    """

    def __init__(self, run: Path, wanted: Mapping[str, int], seed: int) -> None:
        self._run, self._kept = run, run / KEPT
        kept = json.loads(self._kept.read_text()) if self._kept.exists() else {}
        self.done = [Injection(**each) for each in kept.get("done", ())]
        self.replaced: int = kept.get("replaced", 0)
        #: Error of each start that failed, and the seconds of all starts.
        self.ends: list[str] = kept.get("ends", [])
        self.seconds: float = kept.get("seconds", 0.0)
        left = Counter(wanted) - Counter(each.kind for each in self.done)
        self._rng = random.Random(f"{seed} {len(self.done)}")
        self._deck = sorted(left.elements())
        self._rng.shuffle(self._deck)
        self._down: dict[int, psutil.Process] = {}  # servers of dead or hung replicas
        self._hung: dict[int, tuple[psutil.Process, Injection]] = {}
        self._slow: tuple[psutil.Process, float] | None = None  # the process, and the end of its slow time
        self._lock, self._over = threading.Lock(), threading.Event()
        log = run / "train.log"
        self._read = log.stat().st_size if log.exists() else 0
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
        """Record that the run ended; it may start again.

        Args:
            how: Error of a failed run.
        """
        self._follow()
        with self._lock:
            for injection in self.done:
                if injection.kind == "trainer" and injection.reported_after_s is None:
                    injection.reported_after_s = round(time.time() - injection.at, 1)
                elif injection.reported_after_s is None and injection.kind != "slow":
                    injection.ended_first = True
            self._down, self._hung, self._slow = {}, {}, None
            self.seconds += time.time() - self._started
            self._started = time.time()
            self.ends += [how] * bool(how)
            if self._run.is_dir():
                kept = {
                    "done": [asdict(injection) for injection in self.done],
                    "replaced": self.replaced,
                    "ends": self.ends,
                    "seconds": self.seconds,
                }
                self._kept.write_text(json.dumps(kept))

    # ---- the thread ----

    def _loop(self) -> None:
        while not self._over.wait(0.1):
            self._follow()
            with self._lock, suppress(psutil.Error):
                self._pulse()
                self._inject()

    def _follow(self) -> None:
        """Read the new lines of the log."""
        log = self._run / "train.log"
        if not log.exists():
            return
        with self._lock, log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
            end = data.rfind(b"\n") + 1
            self._read += end
            for line in data[:end].decode(errors="replace").splitlines():
                self._read_line(line)

    def _read_line(self, line: str) -> None:
        self.replaced += bool(REPLACED.search(line))
        for kind, pattern in REPORTS.items():
            if not pattern.search(line):
                continue
            kinds = ("kill", "hang") if kind == "replica" else (kind,)
            unreported = [i for i in self.done if i.kind in kinds and i.reported_after_s is None and not i.ended_first]
            hangs = "no answer for" in line  # else its process has ended
            unreported = [i for i in unreported if (i.kind == "hang") == hangs] or unreported
            if unreported:
                unreported[0].reported_after_s = round(time.time() - unreported[0].at, 1)

    def _pulse(self) -> None:
        now = time.time()
        if self._slow is not None:
            process, until = self._slow
            stops = now < until and now % _PULSE_S < _STOPPED * _PULSE_S
            process.send_signal(signal.SIGSTOP if stops else signal.SIGCONT)
            if now >= until:
                self._slow = None
        for process, injection in self._hung.values():
            after = injection.reported_after_s
            if after is not None and now > injection.at + after + _LINGER_S:
                injection.outlived = process.is_running() and process.status() != psutil.STATUS_ZOMBIE

    def _inject(self) -> None:
        metrics = self._run / "metrics.jsonl"
        if time.time() < self._next or not _written_since(metrics, self._started):
            return
        for place, kind in enumerate(self._deck):
            if (victim := self._victim(kind)) is None:
                continue
            name, process = victim
            self._harm(kind, name, process)
            del self._deck[place]
            self._next = time.time() + self._rng.choice(_PAUSES_S)
            return

    def _victim(self, kind: str) -> tuple[str, psutil.Process] | None:
        """Return a process for a fault, or ``None`` if there is none; one replica is spared to continue the run."""
        if kind == "trainer":
            saved = self._run / "checkpoints" / "latest_checkpointed_iteration.txt"
            if not _written_since(saved, self._started):
                return None
        if kind in ("relay", "trainer"):
            found = processes(self._run, kind)
            return (kind, self._rng.choice(found)) if found else None
        pairs = []
        for server in processes(self._run, "server"):
            engines = [child for child in server.children(recursive=True) if _is_engine(child)]
            if _starts(server):
                continue
            if server.pid not in self._down and engines and (self._slow is None or engines[0] != self._slow[0]):
                pairs.append((server, engines[0]))
        if not pairs or (kind != "slow" and len(pairs) < 2) or (kind == "slow" and self._slow is not None):
            return None
        server, engine = self._rng.choice(sorted(pairs, key=lambda pair: pair[0].pid))
        name = "engine" if kind == "slow" else self._rng.choice(["server", "engine"])
        if kind != "slow":
            self._down[server.pid] = server
        return name, server if name == "server" else engine

    def _harm(self, kind: str, name: str, process: psutil.Process) -> None:
        injection = Injection(kind, name, time.time())
        self.done.append(injection)
        if kind == "hang":
            process.suspend()
            self._hung[process.pid] = process, injection
        elif kind == "slow":
            self._slow = process, time.time() + _SPAN_S
        else:
            process.kill()


def _starts(server: psutil.Process) -> bool:
    """Return whether the server still starts; Ray puts an actor's current method into the process title."""
    return ".launch_server" in " ".join(server.cmdline())


def _is_engine(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).startswith(TITLES["engine"])
    return False


def _written_since(file: Path, when: float) -> bool:
    return file.exists() and file.stat().st_size > 0 and file.stat().st_mtime > when
