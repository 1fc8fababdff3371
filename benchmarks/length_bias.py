"""What selection by length does to the lengths that are trained: a simulation with the real scheduler.

    python -m benchmarks.length_bias [--json] [--quick] [--arm ARM] [TRACE.parquet ...]

The policy is constant: each prompt has the lengths that a recorded run sampled for it. An engine with few slots makes a
token a step for each running request; the sorted scheduler loads, stops and harvests as in training. ``fresh`` draws a
new length whenever a response is generated anew, as plain on-policy regeneration does; ``coupled`` keeps it, as the
same noise does under the same policy; ``partial`` keeps it and goes on where it stood. ``rolling``, of
:mod:`benchmarks.sorted_slots`, is ``partial`` with prompts loaded as others leave. ``arrivals`` is
``sorting.mode=stream`` with ``harvest=shortest``: as many update batches are under way as are loaded together in the
others, engines run on over updates, and "first" and "last" are what is no version old, and what is as old as may be.
With an unbiased pipeline the mean length that is trained is the mean length there is.
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
from verl_rhyme.scheduling.rules import Rules, named
from verl_rhyme.scheduling.scheduler import Scheduler

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

ARMS = {"fresh": "on_policy", "coupled": "on_policy", "partial": "partial", "arrivals": "stream"}
#: Of :mod:`benchmarks.sorted_slots`: ``max_staleness``; ``None``: so that as many updates are here as in a load.
ROLLING = {"rolling": None, "rolling, one version": 1}
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
    lengths: list[np.ndarray], arm: str, unit: str, group_batches: int, rng: np.random.Generator, slots: int = SLOTS
) -> tuple[np.ndarray, np.ndarray, Engine]:
    """Lengths in the order of training, how many updates each one's prompt had waited, and the engine afterwards."""
    sizes = {"batch_prompts": BATCH, "batch_samples": BATCH * SAMPLES}
    if arm == "arrivals":
        return _arriving(lengths, named("stream", **sizes, unit=unit, max_staleness=group_batches - 1, **_APART), rng)
    sizes["group_batches"] = group_batches
    if arm in ROLLING:
        rules = named("partial", **sizes, unit=unit, load="rolling", max_staleness=ROLLING[arm] or group_batches - 1)
    else:
        rules = named(ARMS[arm], **sizes, unit=unit, max_staleness=group_batches)
    scheduler, engine = Scheduler(rules), Engine(slots)
    wanted: dict[tuple[str, int], int] = {}
    kept: dict[tuple[str, int], int] = {}
    trained: list[int] = []
    waited: list[int] = []
    for version in range(len(lengths) // BATCH):
        scheduler.begin(version)
        for _ in range(scheduler.loadable(len(lengths) // BATCH - version)):
            scheduler.load(str(scheduler.ledger.loaded), SAMPLES)
        for sample in scheduler.dispatch():
            if sample not in wanted or arm == "fresh":
                wanted[sample] = int(rng.choice(lengths[int(sample[0])]))
            engine.queue.append((sample, kept.get(sample, 0) if rules.continues else 0, wanted[sample]))
        while not scheduler.enough():
            (uid, number), length = engine.run()
            scheduler.generate(uid, number, length, version)
            scheduler.finish(uid, number)
        for (uid, number), tokens in engine.stop():
            kept[uid, number] = tokens
            scheduler.interrupt(uid, number, tokens, version if tokens else None)
        harvest = scheduler.harvest()
        trained += harvest.lengths
        waited += harvest.waited
    return np.array(trained), np.array(waited), engine


_APART: dict[str, Any] = {"harvest": "shortest", "through_training": True}


def _arriving(
    lengths: list[np.ndarray], rules: Rules, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, Engine]:
    """As :func:`trained_lengths`, of what is finished first, and instead of the waiting of prompts its staleness."""
    scheduler, engine = Scheduler(rules), Engine(SLOTS)
    began: dict[tuple[str, int], int] = {}
    trained: list[int] = []
    stale: list[int] = []
    updates = len(lengths) // BATCH
    for version in range(updates):
        scheduler.begin(version)
        for _ in range(scheduler.loadable(updates - version)):
            scheduler.load(str(scheduler.ledger.loaded), SAMPLES)
        while not scheduler.enough():
            for sample in scheduler.dispatch():
                engine.queue.append((sample, 0, int(rng.choice(lengths[int(sample[0])]))))
                began[sample] = version
            (uid, number), length = engine.run()
            scheduler.generate(uid, number, length, began[uid, number])
            scheduler.finish(uid, number)
        harvest = scheduler.harvest()
        trained += harvest.lengths
        stale += harvest.staleness
    return np.array(trained), np.array(stale), engine


def recorded(path: Path) -> list[np.ndarray]:
    """Lengths of each prompt's responses in a trace, tokens."""
    pools: dict[bytes, list[int]] = {}
    for step in traces.load(path):
        for response in step:
            pools.setdefault(response.key, []).append(len(response.tokens))
    return [np.array(pool) for pool in pools.values()]


def measure(path: Path, arm: str, unit: str, group_batches: int, rounds: int) -> dict[str, Any]:
    there = recorded(path)
    count = len(there) // (BATCH * group_batches) * BATCH * group_batches
    shifts, firsts, lasts, shares = [], [], [], []
    for seed in range(rounds):
        rng = np.random.default_rng(seed)
        chosen = [there[i] for i in rng.permutation(len(there))[:count]]
        trained, waited, engine = trained_lengths(chosen, arm, unit, group_batches, rng)
        mean = np.mean([pool.mean() for pool in chosen])
        shifts.append(trained.mean() / mean - 1)
        firsts.append(trained[waited == 0].mean() / mean - 1)
        lasts.append(trained[waited == group_batches - 1].mean() / mean - 1)
        shares.append(1 - trained.sum() / max(engine.made, trained.sum()))
    return {
        "benchmark": "length_bias",
        "trace": path.stem,
        "arm": arm,
        "unit": unit,
        "group_batches": group_batches,
        "shift": round(float(np.mean(shifts)), 4),
        "shift_standard_error": round(float(np.std(shifts, ddof=1) / np.sqrt(rounds)), 4),
        "shift_of_first_update": round(float(np.mean(firsts)), 4),
        "shift_of_last_update": round(float(np.mean(lasts)), 4),
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
        for unit in ("group", "trajectory"):
            for group_batches in (2, 4, 8):
                for each in arm or ARMS:
                    row = measure(path, each, unit, group_batches, 3 if quick else ROUNDS)
                    shown = {**row, "slots": SLOTS, "update_samples": BATCH * SAMPLES, "commit": commit()}
                    print(json.dumps(shown) if as_json else row, flush=True)


if __name__ == "__main__":
    app()
