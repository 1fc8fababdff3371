"""What selection by length does to the lengths that are trained: a simulation with the real scheduler.

    python -m benchmarks.studies.length_bias [--json] [--quick] [--arm ARM] [TRACE.parquet ...]

The policy is constant, and there is one epoch: each prompt has the lengths that a recorded run sampled for it, and is
expected to have the mean of as many others. An engine makes a token a step for each running request; the scheduler
loads, stops and collects as in a colocated run. What is regenerated keeps its length, as the same noise does under the
same policy (coupled sampling, the default); "fresh" draws another. ``shift`` is the mean length that is trained against
that of the responses as they were first drawn: 0 where no length is preferred. ``first_half`` is the same of the
epoch's first half, ``spread`` the standard deviation of updates' mean lengths, against the mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import traces
from benchmarks.machine import commit
from verl_rhyme.scheduling.rules import LOADED_BATCHES, TAIL_SHARE, Rules
from verl_rhyme.scheduling.scheduler import Scheduler

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

SAMPLES, BATCH, SLOTS, ROUNDS, LOAD = 8, 8, 64, 8, 4
_SORTED: dict[str, Any] = {"in_flight": LOAD, "refill": "when_empty"}
ARMS: dict[str, dict[str, Any]] = {
    "full, k = 0": {"max_staleness": 0, "in_flight": LOADED_BATCHES, "refill": "when_empty"},
    "tail batching": {"max_staleness": 0, "put_off": TAIL_SHARE},
    "full, k = 1": {"max_staleness": 1},
    "full, k = 2": {"max_staleness": 2},
    "sorted, k = 0": {"max_staleness": 0, **_SORTED},
    "sorted, k = 3": {"max_staleness": 3, **_SORTED},
    "stream, k = 1": {"max_staleness": 1, "take": "loaded"},
}
ARMS |= {f"{name}, fresh": ARMS[name] for name in ("full, k = 0", "tail batching", "sorted, k = 0")}


class Engine:
    """Slots that make a token a step each, first come first served."""

    def __init__(self, slots: int) -> None:
        self.slots, self.made, self.steps = slots, 0, 0
        self.running: dict[tuple[str, int], list[int]] = {}  # tokens made, tokens wanted
        self.queue: list[tuple[tuple[str, int], int, int]] = []

    def run(self) -> tuple[tuple[str, int], int]:
        """Until the next response ends: which, and its length."""
        while self.queue and len(self.running) < self.slots:
            sample, had, wanted = self.queue.pop(0)
            self.running[sample] = [had, wanted]
        sample, (had, wanted) = min(self.running.items(), key=lambda item: item[1][1] - item[1][0])
        steps = wanted - had
        for progress in self.running.values():
            progress[0] += steps
        self.made += steps * len(self.running)
        self.steps += steps
        del self.running[sample]
        return sample, wanted

    def stop(self) -> Iterator[tuple[tuple[str, int], int]]:
        """What is cut short, and its tokens."""
        cut = [(sample, had) for sample, (had, _) in self.running.items()] + [(s, had) for s, had, _ in self.queue]
        self.running, self.queue = {}, []
        yield from cut


def trained_lengths(
    pools: list[np.ndarray], arm: str, unit: Any, rng: np.random.Generator
) -> tuple[list[list[int]], np.ndarray, Engine]:
    """Lengths of each update, those of all responses as they were first drawn, and the engine afterwards."""
    scheduler = Scheduler(Rules(BATCH, BATCH * SAMPLES, unit=unit, **ARMS[arm]))
    engine, updates, again = Engine(SLOTS), list[list[int]](), set[tuple[str, int]]()
    drawn = np.array([rng.choice(pool, SAMPLES) for pool in pools])
    expected = [rng.choice(pool, SAMPLES).mean() for pool in pools]
    kept: dict[tuple[str, int], tuple[int, int]] = {}  # tokens, and the version of the first
    for version in range(len(pools) // BATCH):
        scheduler.begin(version, len(pools) // BATCH - version)
        while count := scheduler.loadable():
            loaded = range(scheduler.ledger.loaded, scheduler.ledger.loaded + count)
            for uid in loaded:
                scheduler.load(str(uid), SAMPLES)
            for uid in loaded:
                scheduler.expect(str(uid), expected[uid])
        for sample in scheduler.dispatch():
            row, number = int(sample[0]), sample[1]
            had, _ = kept.setdefault(sample, (0, version))
            fresh = arm.endswith("fresh") and sample in again
            engine.queue.append((sample, had, int(rng.choice(pools[row]) if fresh else drawn[row, number])))
            again.add(sample)
        while not scheduler.has_batch():
            sample, length = engine.run()
            if scheduler.generate(*sample, length, kept.pop(sample)[1]):
                scheduler.finish(*sample)
        for sample, tokens in engine.stop():
            _, first = kept.pop(sample)
            if scheduler.interrupt(*sample, tokens, first if tokens else None) and tokens:
                kept[sample] = tokens, first
        updates.append(scheduler.collect().lengths)
    return updates, drawn, engine


def recorded(path: Path) -> list[np.ndarray]:
    """Lengths of each prompt's responses in a trace, tokens."""
    pools: dict[bytes, list[int]] = {}
    for step in traces.load(path):
        for response in step:
            pools.setdefault(response.key, []).append(len(response.tokens))
    return [np.array(pool) for pool in pools.values()]


def measure(path: Path, arm: str, unit: str, rounds: int) -> dict[str, Any]:
    there = recorded(path)
    count = len(there) // (BATCH * LOAD) * BATCH * LOAD
    rows = []
    for seed in range(rounds):
        rng = np.random.default_rng(seed)
        updates, drawn, engine = trained_lengths(
            [there[i] for i in rng.permutation(len(there))[:count]], arm, unit, rng
        )
        means = np.array([np.mean(lengths) for lengths in updates]) / drawn.mean()
        wasted = 1 - sum(map(sum, updates)) / engine.made
        rows.append((means.mean() - 1, means[: len(means) // 2].mean() - 1, means.std(), wasted))
    shift, first_half, spread, wasted = (np.mean(rows, axis=0).round(4) + 0.0).tolist()  # no -0.0
    return {
        "benchmark": "length_bias",
        "trace": path.stem,
        "arm": arm,
        "unit": unit,
        "shift": shift,
        "shift_standard_error": round(float(np.std([row[0] for row in rows], ddof=1) / np.sqrt(rounds)), 4),
        "first_half": first_half,
        "spread": spread,
        "wasted_share": wasted,
    }


@app.command()
def main(
    files: Annotated[list[Path] | None, typer.Argument(help="default: all in benchmarks/traces")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="one trace, few rounds")] = False,
    arm: Annotated[list[str] | None, typer.Option(help="may be given again; default: all")] = None,
) -> None:
    """Simulate and print."""
    if unknown := sorted(set(arm or ()) - set(ARMS)):
        raise typer.BadParameter(f"no arm {', '.join(unknown)}; there are: {', '.join(ARMS)}")
    paths = files or sorted(traces.FOLDER.glob("*.parquet"))
    for path in paths[:1] if quick else paths:
        for unit in ("group", "trajectory"):
            for each in arm or ARMS:
                row = measure(path, each, unit, 3 if quick else ROUNDS)
                shown = {**row, "slots": SLOTS, "update_samples": BATCH * SAMPLES, "commit": commit()}
                print(json.dumps(shown) if as_json else row, flush=True)


if __name__ == "__main__":
    app()
