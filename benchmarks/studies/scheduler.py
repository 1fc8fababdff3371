"""What an event costs the scheduler: microseconds by kind of event and size of the ledger.

    python -m benchmarks.studies.scheduler [--json] [--quick] [--every N]

The pure scheduler without engines, driven as its coordinator drives it: after every event it is asked whether it is
has_batch() for an update batch, and what may start in place of what ended (dispatch()). Prompts of 16 samples load
in groups of four update batches, half of them may run at a time; lengths are log-normal, and a sample ends when a clock
that runs for all has come to its length. Its reward comes 16 responses later. A collected batch interrupts what
runs, each one followed by has_settled(), but not where it finishes first.

"generate" and "finish" are the event, has_batch() and dispatch() together, and events per second are of these; "start"
is a sample's share of a dispatch() that starts many; "interrupt" the event and has_settled(); "collect" and "begin" are
once an update. Processor time of one thread: medians, and the 95th percentile of "generate". ``--every N``: only every
N-th event is asked about and timed (of 256 samples' every 5th at least, and so on), where asking takes milliseconds.
"""

from __future__ import annotations

import heapq
import json
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import numpy as np
import typer

from benchmarks.machine import commit, describe
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.scheduling.scheduler import Scheduler

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

SAMPLES, GROUP_BATCHES, REWARD_AFTER, UPDATES = 16, 4, 16, 8
ARMS: dict[str, dict[str, Any]] = {
    "on-policy": {"max_staleness": 0},
    "colocated": {"max_staleness": GROUP_BATCHES - 1},
    "separate": {"max_staleness": GROUP_BATCHES - 1, "separate": True, "relayed": True, "at_version": "finish"},
}
T = TypeVar("T")


class Run:
    """One arm at one size."""

    def __init__(self, arm: str, samples: int, every: int) -> None:
        batch = samples // GROUP_BATCHES
        self.rules = Rules(batch // SAMPLES, batch, in_flight=GROUP_BATCHES, refill="when_empty", **ARMS[arm])
        self.scheduler, self.limit, self.every = Scheduler(self.rules), samples // 2, every
        self.random, self.clock, self.events = random.Random(7), 0.0, 0
        self.running: dict[tuple[str, int], float] = {}  # when it started, by the clock
        self.ends: list[tuple[float, tuple[str, int], float]] = []  # with when it started
        self.unrewarded: deque[tuple[str, int]] = deque()
        self.microseconds: dict[str, list[float]] = defaultdict(list)

    def timed(self, kind: str, call: Callable[[], T], share: Callable[[T], int] = lambda _: 1) -> T:
        before = time.thread_time_ns()
        result = call()
        spent = (time.thread_time_ns() - before) / 1000
        if count := share(result):
            self.microseconds[kind].append(spent / count)
        return result

    def launch(self, samples: list[tuple[str, int]]) -> None:
        for sample in samples:
            self.running[sample] = self.clock
            heapq.heappush(self.ends, (self.clock + self.random.lognormvariate(8.0, 0.8), sample, self.clock))

    def event(self, kind: str, report: Callable[[], Any]) -> bool:
        """Whether it is enough now."""
        self.events += 1
        scheduler = self.scheduler
        if self.events % self.every:
            report()
            return False

        def whole() -> tuple[bool, list[tuple[str, int]]]:
            report()
            return scheduler.has_batch(), scheduler.dispatch(self.limit)

        enough, started = self.timed(kind, whole)
        self.launch(started)
        return enough

    def update(self, version: int) -> None:
        scheduler = self.scheduler
        stale = set(self.timed("begin", lambda: scheduler.begin(version)))
        for sample in stale:
            self.running.pop(sample, None)
        self.unrewarded = deque(sample for sample in self.unrewarded if sample not in stale)
        for _ in range(scheduler.loadable()):
            scheduler.load(f"{scheduler.ledger.loaded:032x}", SAMPLES)
        self.launch(self.timed("start", lambda: scheduler.dispatch(self.limit), len))
        while not (self.ended() and scheduler.ready()):
            pass
        if not scheduler.rules.finishes:
            for sample, began in self.running.items():
                self.interrupt(sample, int(self.clock - began), version)
            self.running.clear()
        self.timed("collect", scheduler.collect)

    def ended(self) -> bool:
        """The next response ends, and the reward of an earlier one comes; whether it is enough."""
        scheduler, enough = self.scheduler, False
        if not self.ends and not self.unrewarded:  # it was enough when nobody asked
            self.launch(scheduler.dispatch(self.limit))
            return True
        if len(self.unrewarded) > REWARD_AFTER or not self.ends:
            uid, number = self.unrewarded.popleft()
            enough = self.event("finish", lambda: scheduler.finish(uid, number))
        if self.ends:
            self.clock, sample, began = heapq.heappop(self.ends)
            if self.running.get(sample) == began:
                del self.running[sample]
                arguments = (*sample, int(self.clock - began), scheduler.version)
                enough = self.event("generate", lambda: scheduler.generate(*arguments))
                self.unrewarded.append(sample)
        return enough

    def interrupt(self, sample: tuple[str, int], tokens: int, version: int) -> None:
        self.events += 1
        if self.events % self.every:
            self.scheduler.interrupt(*sample, tokens, version)
        else:
            arguments = (*sample, tokens, version)
            self.timed("interrupt", lambda: (self.scheduler.interrupt(*arguments), self.scheduler.has_settled(0.0)))

    def figures(self) -> dict[str, Any]:
        medians = {f"{kind}_us": round(float(np.median(spent)), 1) for kind, spent in self.microseconds.items()}
        asked = [*self.microseconds["generate"], *self.microseconds["finish"]]
        medians["generate_us_p95"] = round(float(np.percentile(self.microseconds["generate"], 95)), 1)
        return {**medians, "events_per_second": round(1e6 / float(np.mean(asked)))}


def measure(arm: str, samples: int, every: int, updates: int) -> dict[str, Any]:
    run = Run(arm, samples, every)
    for version in range(updates):
        run.update(version)
    return run.figures()


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="two sizes, three updates")] = False,
    every: Annotated[int, typer.Option(help="ask and time only after so many events")] = 1,
) -> None:
    """Measure and print."""
    about = {"benchmark": "scheduler", "machine": describe(), "commit": commit()}
    for samples in (256, 2048) if quick else (256, 2048, 8192, 32768):
        for arm in ARMS:
            asked = min(every, samples // 64) | 1  # both kinds, which take turns
            row = {"arm": arm, "samples": samples, "every": asked}
            row |= measure(arm, samples, asked, 3 if quick else UPDATES)
            print(json.dumps({**about, **row}) if as_json else row, flush=True)


if __name__ == "__main__":
    app()
