"""Watches a run from outside: asks its servers how many requests run, and writes each step's bubble ratio.

``python -m verl_rhyme.observability.observe RUN_DIR`` beside the run, until it is told to stop or its parent is gone.
It needs nothing of ours within the run: verl names its servers in the file ``rollout.prometheus.file``
(``rollout.prometheus.enable=true``), vLLM counts with ``rollout.disable_log_stats=false``, and verl's ``file`` logger
tells when steps were. What it finds goes to ``sampled.jsonl`` in the run folder, a line a step, which the report reads.
Whatever goes wrong is told once, leaves the step's figure out, with the reason, and disturbs nobody.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from verl_rhyme import plugin
from verl_rhyme.config import RhymeConfig, config_tree
from verl_rhyme.observability import events, metrics, sampled, steps
from verl_rhyme.observability.progress import MetricsFollower
from verl_rhyme.observability.sampled import Answers, Unknown
from verl_rhyme.scheduling.rules import of_config

#: vLLM's name (``vllm.v1.metrics.loggers``): requests in its batch, of one engine a sample.
GAUGE = "vllm:num_requests_running"
#: prometheus_client's filter, of the application that vLLM mounts behind ``/metrics``; all metrics otherwise.
PATHS = (f"/metrics/?name[]={quote(GAUGE, safe='')}", "/metrics")
INTERVAL_S, TIMEOUT_S, LOOK_S = 0.1, 2.0, 0.1


class Server(threading.Thread):
    """Asks one server again and again, in a thread of its own: one that hangs holds up no other."""

    def __init__(self, address: str, interval: float) -> None:
        super().__init__(name=f"observe {address}", daemon=True)
        self.address, self._interval = address, interval
        #: Why the last question had no answer; empty where it had.
        self.failed = ""
        #: Questions answered, and seconds from question to answer in all.
        self.answers, self.seconds = 0, 0.0
        self._lock, self._stop_asking = threading.Lock(), threading.Event()
        self._times: list[float] = []
        self._running: list[float] = []

    def stop(self) -> None:
        self._stop_asking.set()

    def take(self, before: float) -> Answers:
        """All answers that are kept; those of earlier than ``before`` are kept no longer."""
        with self._lock:
            found = np.array(self._times), np.array(self._running)
            first = max(0, int(np.searchsorted(found[0], before)) - 1)
            del self._times[:first], self._running[:first]
        return found

    def run(self) -> None:
        place = urlsplit(f"//{self.address}")
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT_S)
        paths = list(PATHS)
        while not self._stop_asking.is_set():
            asked = time.time()
            try:
                running = self._ask(connection, paths)
                answered = time.time()
                with self._lock:
                    self._times.append(answered)  # a busy server lets the question wait, then reads and answers
                    self._running.append(running)
                self.failed, self.answers, self.seconds = "", self.answers + 1, self.seconds + answered - asked
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                self.failed = str(error) or type(error).__name__
            self._stop_asking.wait(max(0.0, self._interval - (time.time() - asked)))

    @staticmethod
    def _ask(connection: http.client.HTTPConnection, paths: list[str]) -> float:
        """Requests that run. ``paths`` loses those that this server does not know."""
        while True:
            connection.request("GET", paths[0])
            response = connection.getresponse()
            body = response.read()
            if (count := running(body.decode("utf-8", "replace")) if response.status == 200 else None) is not None:
                return count
            if len(paths) == 1:
                raise ValueError(f"{paths[0]} has no {GAUGE} (status {response.status})")
            del paths[0]


def running(text: str) -> float | None:
    """The sum of the gauge over a server's engines; ``None`` where it is not there.

    Args:
        text: Of Prometheus' exposition format.

    Raises:
        ValueError: It is none.
    """
    from prometheus_client.parser import text_string_to_metric_families

    values = [s.value for family in text_string_to_metric_families(text) for s in family.samples if s.name == GAUGE]
    return sum(values) if values else None


class Observer:
    """One run.

    Args:
        run_dir: With ``metrics.jsonl``, which appears later, and hydra's record of the config.
        interval: Seconds between two questions to a server.
        tell: Takes what the user should know.
    """

    def __init__(self, run_dir: Path, interval: float = INTERVAL_S, tell: Any = None) -> None:
        self.run_dir, self.servers = run_dir, dict[str, Server]()
        self._interval, self._began = interval, time.time()
        self._follower = MetricsFollower(run_dir / steps.METRICS_FILE)
        self._follower.skip()
        self._config: Any = None
        self._before: sampled.Step | None = None
        self._from = -np.inf
        self._tell = tell or (lambda text: print(f"verl-rhyme observe: {text}", file=sys.stderr, flush=True))
        self._told: set[str] = set()
        self._named = 0.0

    def look(self) -> None:
        """Once, now: which servers there are, and the steps that were logged since the last call."""
        try:
            self._find()
            logged = self._follower.poll()
        except Exception as error:  # such as a file system that does not answer: the next look may see more
            self._once("look", f"cannot see the run: {type(error).__name__}: {error}")
            return
        now = time.time()
        for number, data in logged:
            if metrics.EPOCH not in data:  # validation before the training
                self._from = now
            else:
                self._write(number, self._step(data, now))

    def close(self) -> None:
        for server in self.servers.values():
            server.stop()

    def _find(self) -> None:
        """Servers by verl's file, which it may write again, when further ones are launched."""
        if self._config is None:
            self._config = _read_config(self.run_dir / steps.CONFIG_FILE, self._began)
        if self._config is None:
            return
        try:
            path = Path(self._config.actor_rollout_ref.rollout.prometheus.file)
            written = path.stat().st_mtime
            if written < self._began - 1 or written == self._named:  # of an earlier start, or as it was
                return
            addresses = _addresses(path)
        except Exception:  # not there, or half written
            return
        if not addresses:
            return
        self._named = written
        for address in [*self.servers]:
            if address not in addresses:
                self.servers.pop(address).stop()
        for address in addresses:
            if address not in self.servers:
                self.servers[address] = Server(address, self._interval)
                self.servers[address].start()

    def _step(self, data: dict[str, Any], now: float) -> dict[str, Any]:
        """What is found of a step that was just logged."""
        before, self._before = self._before, None
        try:
            step = self._before = sampled.Step.of(data, now)
            if not self.servers:
                raise Unknown(
                    "verl named no servers: set actor_rollout_ref.rollout.prometheus.enable=true and "
                    "actor_rollout_ref.rollout.disable_log_stats=false"
                )
            slots, runs_on = self._slots()
            begin, end, without = sampled.window(step, before, runs_on)
            kept = step.harvested if runs_on else step.between
            answers = {address: server.take(kept) for address, server in self.servers.items()}
            for address, server in self.servers.items():
                if server.failed:
                    self._once(address, f"{address} does not answer: {server.failed}; bubble ratios stay unknown")
            ratio = sampled.bubble_ratio(answers, slots, max(begin, self._from), end, without, whole=runs_on)
            return {metrics.BUBBLE_RATIO_SAMPLED: ratio, metrics.BUBBLE_SLOTS_SAMPLED: slots}
        except Exception as error:
            why = str(error) if isinstance(error, Unknown) else f"{type(error).__name__}: {error}"
            if self._before is None:
                self._from = now  # nobody knows when this step trained: the next one begins here
            self._once("unknown", f"the bubble ratio of a step is not known: {why}")
            return {metrics.BUBBLE_RATIO_UNKNOWN: why}

    def _slots(self) -> tuple[int, bool]:
        """Q of the bubble ratio, as the run's event log tells it, or as its trainer would; engines run on."""
        trainer, rollout = self._config.trainer, self._config.actor_rollout_ref.rollout
        tree = config_tree.from_verl(self._config)
        info = events.read_info(Path((tree and tree.events.dir) or Path(trainer.default_local_dir, "events")))
        samples, runs_on = self._in_flight(tree)
        if info.get("rollout"):
            runs_on = info["rollout"] == "step"
        fillable = metrics.fillable_slots(len(self.servers) * rollout.max_num_seqs, samples)
        return int(info.get("slots") or fillable), runs_on

    def _in_flight(self, tree: RhymeConfig | None) -> tuple[int, bool]:
        """The most samples that may be started and not finished; engines run while the actor trains."""
        trainer, rollout, data = self._config.trainer, self._config.actor_rollout_ref.rollout, self._config.data
        mode = str(trainer.v1.trainer_mode)
        if (rules := of_config(self._config, tree)) is not None:
            return rules.samples_in_flight, rules.starts_through_training
        ahead = trainer.v1.get(mode, {}).get("num_warmup_batches", 0)
        groups = self._config.algorithm.get("filter_groups") or {}
        batches = max(1 + ahead, groups.get("max_inflight_gen_batches", 1) if groups.get("enable") else 1)
        return int(batches * data.train_batch_size) * rollout.n, mode == "separate_async"

    def _write(self, number: int, data: dict[str, Any]) -> None:
        try:
            with (self.run_dir / steps.SAMPLED_FILE).open("a") as file:
                file.write(json.dumps({"step": number, "data": data}) + "\n")
        except OSError as error:
            self._once("write", f"{self.run_dir / steps.SAMPLED_FILE} cannot be written ({error.strerror})")

    def _once(self, about: str, text: str) -> None:
        if about not in self._told:
            self._told.add(about)
            self._tell(text)


def _read_config(path: Path, since: float) -> Any:
    """What hydra wrote down of the run that starts; ``None`` before. Overrides come last: then it is whole."""
    from omegaconf import OmegaConf

    last = path.with_name("overrides.yaml")
    if not last.is_file() or last.stat().st_mtime < since - 1:
        return None
    plugin.register_interpolations()
    return OmegaConf.load(path)


def _addresses(path: Path) -> list[str]:
    import yaml

    jobs = yaml.safe_load(path.read_text())["scrape_configs"]
    return [str(target) for job in jobs for part in job.get("static_configs", ()) for target in part["targets"]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl_rhyme.observability.observe", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="run folder")
    parser.add_argument("--interval", type=float, default=INTERVAL_S, help="seconds between questions (default: 0.1)")
    parser.add_argument("--parent", type=int, default=os.getppid(), help="end when this process is not the parent")
    options = parser.parse_args(arguments)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with contextlib.suppress(OSError):
        os.nice(5)
    observer = Observer(options.run_dir.resolve(), options.interval)
    while not stopped.is_set() and os.getppid() == options.parent:
        observer.look()
        stopped.wait(LOOK_S)
    observer.look()
    observer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
