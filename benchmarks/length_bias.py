"""What the choice of what is trained does to the lengths that are trained: a simulation with the real scheduler.

    python -m benchmarks.length_bias [--json] [--quick] [--arm ARM] [TRACE.parquet ...]

The policy is constant: each prompt has the lengths that a recorded run sampled for it. An engine with few slots makes a
token a step for each running request; the scheduler loads, stops and collects as in training, until all prompts of a
trace are trained: an epoch. ``full`` and ``sorted`` (SortedRL, loads of 4 batches) at staleness 0 regenerate what is
interrupted, ``coupled`` with the same length, as the same noise makes under the same policy, ``fresh`` with a new one;
above 0 it continues. ``shift`` is how much longer the trained responses are than those there are: 0 without bias. Over
updates: how far the mean lengths of single updates are from that, and the longest that a prompt waited.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import typer

from benchmarks import traces
from benchmarks.machine import commit
from verl_rhyme.scheduling.rules import TAIL_SHARE, Rules, Unit
from verl_rhyme.scheduling.scheduler import Scheduler

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

_LOADS: dict[str, Any] = {"in_flight": 4, "refill": "when_empty"}
ARMS: dict[str, dict[str, Any]] = {
    "full, staleness 0, coupled": {"max_staleness": 0, "put_off": TAIL_SHARE},
    "full, staleness 0, fresh": {"max_staleness": 0, "put_off": TAIL_SHARE},
    "full, staleness 1": {"max_staleness": 1},
    "full, staleness 2": {"max_staleness": 2},
    "full, staleness 4": {"max_staleness": 4},
    "sorted, staleness 0, coupled": {"max_staleness": 0, **_LOADS},
    "sorted, staleness 0, fresh": {"max_staleness": 0, **_LOADS},
    "sorted, staleness 1": {"max_staleness": 1, **_LOADS},
    "stream, staleness 1": {"max_staleness": 1, "take": "loaded"},
}
SAMPLES, BATCH, SLOTS, ROUNDS = 8, 8, 16, 8


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
    lengths: list[np.ndarray], arm: str, unit: Unit, rng: np.random.Generator, slots: int = SLOTS
) -> tuple[list[np.ndarray], np.ndarray, Engine]:
    """Lengths of each update, how many updates each trained response's prompt had waited, and the engine afterwards."""
    scheduler, engine = Scheduler(Rules(BATCH, BATCH * SAMPLES, unit=unit, **ARMS[arm])), Engine(slots)
    continues, updates = scheduler.rules.continues, len(lengths) // BATCH
    wanted: dict[tuple[str, int], int] = {}
    kept: dict[tuple[str, int], int] = {}
    oldest: dict[tuple[str, int], int] = {}  # version of the oldest token
    trained: list[np.ndarray] = []
    waited: list[int] = []
    for version in range(updates):
        scheduler.begin(version, updates - version)
        while not scheduler.enough():
            for _ in range(scheduler.loadable()):
                uid = str(scheduler.ledger.loaded)
                scheduler.load(uid, SAMPLES)
                scheduler.expect(uid, float(lengths[int(uid)].mean()))
            for sample in scheduler.dispatch():
                if sample not in wanted or arm.endswith("fresh"):
                    wanted[sample] = int(rng.choice(lengths[int(sample[0])]))
                had = kept.get(sample, 0) if continues else 0
                oldest[sample] = oldest[sample] if had else version
                engine.queue.append((sample, had, wanted[sample]))
            (uid, number), length = engine.run()
            scheduler.generate(uid, number, length, oldest[uid, number])
            scheduler.finish(uid, number)
        for (uid, number), tokens in engine.stop():
            kept[uid, number] = tokens
            scheduler.interrupt(uid, number, tokens, oldest[uid, number] if tokens else None)
        harvest = scheduler.harvest()
        trained.append(np.array(harvest.lengths))
        waited += harvest.waited
    return trained, np.array(waited), engine


def recorded(path: Path) -> list[np.ndarray]:
    """Lengths of each prompt's responses in a trace, tokens."""
    pools: dict[bytes, list[int]] = {}
    for step in traces.load(path):
        for response in step:
            pools.setdefault(response.key, []).append(len(response.tokens))
    return [np.array(pool) for pool in pools.values()]


def measure(path: Path, arm: str, unit: Unit, rounds: int) -> dict[str, Any]:
    there = recorded(path)
    count = len(there) // BATCH * BATCH
    shifts, spreads, shares, waits = [], [], [], []
    for seed in range(rounds):
        rng = np.random.default_rng(seed)
        chosen = [there[i] for i in rng.permutation(len(there))[:count]]
        trained, waited, engine = trained_lengths(chosen, arm, unit, rng)
        mean, tokens = np.mean([pool.mean() for pool in chosen]), sum(update.sum() for update in trained)
        shifts.append(np.concatenate(trained).mean() / mean - 1)
        spreads.append(np.std([update.mean() / mean for update in trained]))
        shares.append(1 - tokens / max(engine.made, tokens))
        waits.append(waited.max())
    return {
        "benchmark": "length_bias",
        "trace": path.stem,
        "arm": arm,
        "unit": unit,
        "shift": round(float(np.mean(shifts)), 4),
        "shift_standard_error": round(float(np.std(shifts, ddof=1) / np.sqrt(rounds)), 4),
        "spread_over_updates": round(float(np.mean(spreads)), 4),
        "waited_most": int(max(waits)),
        "wasted_share": round(float(np.mean(shares)), 4),
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
        for unit in get_args(Unit):
            for each in arm or ARMS:
                row = measure(path, each, unit, 3 if quick else ROUNDS)
                shown = {**row, "slots": SLOTS, "update_samples": BATCH * SAMPLES, "commit": commit()}
                print(json.dumps(shown) if as_json else row, flush=True)


if __name__ == "__main__":
    app()
