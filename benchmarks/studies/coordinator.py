"""The coordinator at size: 8,192 samples in flight on 128 simulated replicas.

    python -m benchmarks.studies.coordinator [--json] [--quick] [--arm NAME] [--seconds S] [--tokens N] [--profile FILE]

The real coordinator, driver, reports, TransferQueue and agent loop workers; engines are simulated
(:mod:`benchmarks.studies.simulated_fleet`), and so is the trainer, which sleeps. Update batches of 512 prompts x 16
samples, 8,192 samples at a time, response lengths log-normal among prompts and within each.

Arms: `on-policy` (k = 0, tail batching) and `colocated` (k = 2, two batches in flight) with engines that stop when a
batch is collected, `separate` (k = 2) with engines that run on while the actor trains; `echo`: attempts that end
as soon as they start and leave nothing in TransferQueue, to find what the coordinator can take: two batches, none
of them collected.

An event is a report of an attempt (generated, finished, interrupted) or a start. "share" is of one core, all threads of
the coordinator's process; "busiest" the most in half a second. "gap" is the time from an attempt's end in its worker,
before it is reported, to the start there that takes its slot. "take" is what the trainer waits for its batch
once all has come. Messages and bytes are counted in the processes that send or receive them: of TransferQueue all that
pass a client's sockets, of Ray calls (each has an answer, which is not counted where it is empty).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import psutil
import ray
import transfer_queue as tq
import typer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from benchmarks.machine import commit, describe
from benchmarks.studies.simulated_fleet import (
    SAMPLES,
    ProbedCoordinator,
    SimulatedWorker,
    count_wire,
    latencies,
    size,
)
from verl_rhyme.agent_loop.session import PROMPTS
from verl_rhyme.agent_loop.stored_attempts import TRAIN
from verl_rhyme.config import SchedulingConfig
from verl_rhyme.coordinator import coordinator
from verl_rhyme.processes.messages import LoadedPrompt, RunSettings
from verl_rhyme.scheduling.rules import of_options
from verl_rhyme.trainer.driver import Driver
from verl_rhyme.trainer.topology import Colocated, Separate

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

IN_FLIGHT = 2  # update batches, at most
#: k, and where the engines are.
ARMS: dict[str, tuple[int, Any]] = {
    "on-policy": (0, Colocated),
    "colocated": (2, Colocated),
    "separate": (2, Separate),
    "echo": (2, Colocated),
}


class CountedDriver(Driver):
    """The real one, and how often, with how much and for how long it asks."""

    def __init__(self, *args: Any) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        super().__init__(*args)

    def _ask(self, method: str, *arguments: Any) -> Any:
        began = time.perf_counter()
        answer = super()._ask(method, *arguments)
        self.seconds[method].append(time.perf_counter() - began)
        self.calls[method] += 1
        self.bytes[method] += size(arguments) + size(answer)
        return answer


class Share:
    """A process's share of one core, looked at each half second."""

    def __init__(self, pid: int) -> None:
        self._process, self._stop = psutil.Process(pid), threading.Event()
        self.shares: list[float] = []
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        self._process.cpu_percent()
        while not self._stop.wait(0.5):
            self.shares.append(self._process.cpu_percent() / 100)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class Trainer:
    """What the pipeline trainer asks of the driver, in its order; it trains by sleeping."""

    def __init__(self, arm: str, workers: list[Any], batch: int, slots: int, train_s: float) -> None:
        staleness, topology = ARMS[arm]
        self.workers, self.batch, self.train_s, self.version = workers, batch, train_s, 0
        manager = SimpleNamespace(
            abort_replicas=lambda reject_request: self.tell("stop"),
            resume_generation_replicas=lambda: self.tell("resume", self.version),
            sleep_replicas=lambda: None,
        )
        self.topology = topology(SimpleNamespace(checkpoint_manager=manager, standalone_checkpoint_manager=manager))
        self.topology.mend = lambda version: 0
        rules = of_options(
            SchedulingConfig(), staleness, batch_prompts=batch, samples=SAMPLES, separate=self.topology.separate
        )
        setting = RunSettings(rules=rules, filters=None, limit=slots, min_starts=1, slots=slots, lost_after=60.0)
        coordinator.Coordinator = ProbedCoordinator  # type: ignore[misc]
        self.driver = CountedDriver(setting, self.load, lambda: [])
        self.loaded = 0
        self.windows: list[tuple[float, float]] = []  # in which samples could be started
        self.trained: list[int] = []

    def tell(self, method: str, *arguments: Any) -> None:
        ray.get([getattr(worker, method).remote(*arguments) for worker in self.workers])

    def load(self, count: int) -> list[LoadedPrompt]:
        uids = [f"{self.loaded + i:032x}" for i in range(-(-count // self.batch) * self.batch)]
        self.loaded += len(uids)
        rows = [
            {
                "uid": uid,
                "raw_prompt": [{"role": "user", "content": "what is it? " * 60}],
                "data_source": "simulated",
                "reward_model": {"style": "rule", "ground_truth": "42"},
                "extra_info": {"index": number, "split": "train"},
                "index": number,
                "agent_name": "single_turn_agent",
            }
            for number, uid in enumerate(uids)
        ]
        tq.kv_batch_put(keys=uids, partition_id=PROMPTS, fields=list_of_dict_to_tensordict(rows), tags=[{}] * len(uids))
        return [LoadedPrompt(uid, SAMPLES) for uid in uids]

    def run(self, steps: int) -> None:
        self.driver.publish(0, steps + IN_FLIGHT)
        for _ in range(steps):
            began = time.time()
            reply = self.driver.next_batch(self.topology)
            if not self.topology.separate:
                self.windows.append((began, time.time() - self.driver.seconds["take_batch"][-1]))
            self.trained.append(len(reply.keys))
            if self.topology.separate:
                self.driver.supply()
            self.topology.give_way()
            time.sleep(self.train_s)
            self.driver.pause()
            if self.topology.separate:
                self.windows.append((began, time.time()))
                self.tell("stop")
            self.version += 1
            tq.kv_clear(keys=reply.keys, partition_id=TRAIN)
            self.tell("resume", self.version)
            self.driver.publish(self.version, steps + IN_FLIGHT - self.version)

    def echo(self) -> None:
        """All samples in flight; no batch is collected."""
        self.driver.publish(0, IN_FLIGHT)
        samples = IN_FLIGHT * self.batch * SAMPLES
        while sum(figures["counts"].get("ended_events", 0) for figures in self.figures()) < 2 * samples:
            time.sleep(0.2)
        self.windows.append((0.0, time.time()))
        self.trained.append(samples)

    def figures(self) -> list[dict[str, Any]]:
        return ray.get([worker.figures.remote() for worker in self.workers])


def measure(
    arm: str, crew: list[Any], batch: int, slots: int, steps: int, tokens: int, seconds: float, profile: str | None
) -> dict[str, Any]:
    ray.get([worker.reset.remote(tokens, seconds, arm == "echo") for worker in crew])
    trainer = Trainer(arm, crew, batch, slots, train_s=0.1 * seconds)
    driver = trainer.driver
    wire = count_wire()
    driver.open(crew, None, 0)
    before = ray.get(driver._actor.figures.remote())
    if profile:
        ray.get(driver._actor.profile.remote(None))
    share, began = Share(before["pid"]), time.perf_counter()
    trainer.echo() if arm == "echo" else trainer.run(steps)
    wall = time.perf_counter() - began
    share.close()
    if profile:
        ray.get(driver._actor.profile.remote(profile))
    after, told = ray.get(driver._actor.figures.remote()), trainer.figures()
    counts: Counter[str] = sum((Counter(worker["counts"]) for worker in told), Counter())
    queue = {"workers": Counter(), "coordinator": Counter(after["wire"]), "trainer": wire}
    for worker in told:
        queue["workers"] += Counter(worker["wire"])
    gaps = latencies(told, slots, trainer.windows) * 1e3
    events, cpu, trained = counts["ended_events"] + counts["starts"], after["cpu"] - before["cpu"], sum(trainer.trained)
    state = json.dumps(driver.state())
    driver.close()
    trainer.tell("stop")
    time.sleep(2.0)  # reports on their way reach TransferQueue
    for partition, keys in (tq.kv_list() or {}).items():
        if keys:
            tq.kv_clear(keys=list(keys), partition_id=partition)

    def each(count: float) -> float:
        return round(count / trained, 3)

    return {
        "arm": arm,
        "in_flight": slots,
        "trained": trained,
        "steps": len(trainer.trained),
        "tokens": tokens,
        "seconds": seconds,
        "wall_s": round(wall, 1),
        "events": events,
        "events_per_s": round(events / wall),
        "share": round(cpu / wall, 3),
        "share_busiest": round(max(share.shares, default=0.0), 2),
        "cpu_us_per_event": round(cpu / events * 1e6, 1),
        "loop_us_per_event": round((after["loop"] - before["loop"]) / events * 1e6, 1),
        "events_per_core_s": round(events / cpu),
        "gap_ms": {q: round(float(np.percentile(gaps, q)), 1) for q in (50, 90, 99, 100)} if len(gaps) else {},
        "gaps": len(gaps),
        "take_ms": [round(ms, 1) for ms in after["take_ms"]],
        "gc_ms": [round(ms, 1) for ms in after["gc_ms"]],
        "asked_s": {method: round(max(s), 2) for method, s in driver.seconds.items()},
        "memory_mib": round(after["rss"] / 2**20),
        "memory_grown_mib": round((after["rss"] - before["rss"]) / 2**20),
        "state_mib": round(len(state) / 2**20, 2),
        "each": {
            "queue_messages": {who: each(count["messages"]) for who, count in queue.items()},
            "queue_bytes": {who: each(count["bytes"]) for who, count in queue.items()},
            "ray_calls": {
                "ended": each(counts["ended_calls"]),
                "begin": each(counts["begin_calls"]),
                "trainer": each(sum(driver.calls.values())),
            },
            "ray_bytes": {
                "ended": each(counts["ended_bytes"]),
                "begin": each(counts["begin_bytes"]),
                "trainer": each(sum(driver.bytes.values())),
            },
            "attempts": each(counts["starts"]),
        },
        "workers_cpu_s": round(sum(worker["cpu"] for worker in told), 1),
    }


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="512 samples in flight, two workers")] = False,
    arm: Annotated[list[str] | None, typer.Option(help="only this one")] = None,
    steps: Annotated[int, typer.Option(help="update batches")] = 3,
    seconds: Annotated[float, typer.Option(help="a response takes on average")] = 60.0,
    tokens: Annotated[int, typer.Option(help="of a response, on average")] = 2000,
    workers: Annotated[int, typer.Option(help="agent loop workers")] = 8,
    profile: Annotated[str | None, typer.Option(help="write a profile of the coordinator's event loop here")] = None,
) -> None:
    """Measure and print."""
    about = {"benchmark": "coordinator", "machine": describe(), "commit": commit()}
    batch, slots = (32, 512) if quick else (512, 8192)
    if quick:
        steps, seconds, workers = 2, 5.0, 2
    os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")  # on few cores it warns of them at every message
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True, logging_level=logging.WARNING)
    tq.init()
    crew = [ray.remote(num_cpus=0, max_concurrency=10_000)(SimulatedWorker).remote() for _ in range(workers)]
    for name in arm or ARMS:
        row = measure(name, crew, batch, slots, steps, tokens, seconds, profile)
        print(json.dumps({**about, **row}) if as_json else row, flush=True)


if __name__ == "__main__":
    app()
