"""Inject faults into real runs and check that each sample is trained exactly once.

    python -m benchmarks.faults [--json] [--quick] [--runs N] [--repeats N] [--again] [--out DIR] [KIND ...]

Real verl, vLLM and GRPO on the tiny world: separate engines, three replicas, weights by the relay, the presets
``stream`` and ``full``. During a run, processes are killed, stopped and slowed (:mod:`benchmarks.fault_injection`:
``kill``, ``hang``, ``slow``, ``relay``, ``trainer``), at random times and several at once. A run that ends early is
started again. Each run's row comes from its event log and metrics. It shows whether each sample was trained once,
within the staleness bound, with the tokens that the engines generated. It also shows what the log reported of each
fault, and which tokens the requests of dead replicas kept. ``cut``: a version of weights crosses a link between two
network namespaces (root), which is cut at a random moment for a random time.

``--out`` keeps the rows. A second start skips finished runs, so ``--runs 1`` adds one run. A run that was terminated
(SIGTERM, as from ``timeout``) resumes from its last checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks import far_link, tiny_run
from benchmarks.fault_injection import KEPT, Injection, Injector, end, redispatched
from benchmarks.machine import commit, describe
from benchmarks.real_run import Cell, Kept, faults, requests_of, short
from benchmarks.tiny_run import RHYME, ROLLOUT
from verl_rhyme.observability import metrics, steps

REPLICAS, BATCH, SAMPLES, SLOTS, LIMIT, PROMPTS, EPOCHS = 3, 6, 4, 6, 384, 24, 3
STEADY_MS, TRAIN_MS, HUNG_S, SAVED = 60.0, 60.0, 20.0, 2
#: Faults of each kind in a run that lasts long enough.
WANTED = {"kill": 3, "hang": 2, "slow": 2, "relay": 3, "trainer": 2}
STALE, STARTS, PRESETS, CUTS = 1, 8, ("stream", "full"), 20
KINDS = (*WANTED, "cut")
_LINK, _PORT, _MBIT = "link", 9000, 100e6

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def cells(kinds: Sequence[str], repeats: int) -> Iterator[Cell]:
    """Yield the runs in their order."""
    of_runs = [kind for kind in kinds if kind != "cut"]
    for seed in range(1, 1 + repeats):
        yield from (Cell(system, ", ".join(of_runs), seed) for system in PRESETS if of_runs)
        if "cut" in kinds:
            yield Cell(_LINK, "cut", seed)


# ---- a run ----


def train(cell: Cell, out: Path, wanted: dict[str, int], epochs: int) -> dict[str, Any]:
    """Make a run with faults until it finishes. Return the injected faults (:func:`summarize`)."""
    folder = cell.folder(out)
    if not (folder / KEPT).exists():
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
    return summarize(injector)


def summarize(injector: Injector) -> dict[str, Any]:
    """Return the part of a run's row that its injector knows."""
    done = injector.done

    def count(injections: Iterable[Injection]) -> Counter[str]:
        return Counter(injection.kind for injection in injections)

    after: dict[str, list[float]] = {}
    for injection in done:
        times = after.setdefault(injection.kind, [])
        if injection.reported_after_s is not None:
            times.append(injection.reported_after_s)
    return {
        "seconds": round(injector.seconds),
        "ends": len(injector.ends),
        "replaced": injector.replaced,
        "injected": count(done),
        "reported": count(each for each in done if each.reported_after_s is not None),
        "ended_first": count(each for each in done if each.ended_first),
        "reported_after_s": after,
        "processes": Counter(f"{each.kind} {each.process}" for each in done),
        "outlived": sum(each.outlived for each in done),
    }


def last_words(log: Path) -> str:
    """Return the last lines of a failed run's log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:])[-400:]


def measure(cell: Cell, folder: Path, injected: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Return the row of a run: its samples and its faults."""
    by_step = dict(sorted(steps.from_metrics(folder / "metrics.jsonl").items()))
    requests, samples, wanted = requests_of(folder), BATCH * SAMPLES, epochs * PROMPTS // BATCH
    checked = faults(requests, by_step, samples, LIMIT, STALE)
    errors = [*checked["faults"], *not_once(requests, wanted, epochs, PROMPTS * SAMPLES)]
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
        **redispatched((folder / "train.log").read_text(errors="replace")),
        "thrown_away_tokens": int(requests["response_tokens"][thrown].sum()),
        "trained_tokens": int(requests["response_tokens"][requests["trained"]].sum()),
        "early_share": short(float(np.mean([row.get(metrics.STREAM_EARLY, 0.0) for row in by_step.values()]))),
        "pearson_least": short(float(min(correlation))),
        "spanning": checked["spanning"],
        "faults": errors,
    }


def not_once(requests: Mapping[str, np.ndarray], wanted_steps: int, epochs: int, of_epoch: int) -> list[str]:
    """Return messages about samples that are missing or were trained twice.

    Args:
        requests: Columns of the event log's requests.
        wanted_steps: Expected training steps.
        epochs: Expected epochs.
        of_epoch: Samples per epoch.
    """
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


# ---- a link ----


async def cuts(seed: int, count: int, root: Path) -> dict[str, Any]:
    """Send versions over a link that is cut once in each; after every other cut the receiver restarts."""
    from benchmarks.weights_across_sites import fetch, write  # its import takes seconds
    from verl_rhyme.weights.claims import claim
    from verl_rhyme.weights.transfer import identity

    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    there, here = claim(root / "there"), claim(root / "here")
    model = {f"layer.{n}": (torch.randn(500_000, generator=generator) / 50).to(torch.bfloat16) for n in range(8)}
    first, errors, done, version, kinds = list[float](), list[str](), 0, 0, Counter[str]()
    with far_link.two_sites(_MBIT) as (name, host), far_link.sender(name, there, host, _PORT):
        wire = far_link.Wire(host, _PORT, delay_s=0.01)
        async with wire.running():
            while done < count:
                version += 1
                for tensor in model.values():  # 40% of the words change, as in the tiny world
                    tensor.view(torch.int16).bitwise_xor_(
                        (torch.rand(tensor.shape, generator=generator) < 0.4).to(torch.int16)
                    )
                size, packed = write(there, version, model), rng.random() < 0.5
                came: list[float] = []
                fetching = asyncio.create_task(fetch(here, there, version, wire, packed, came))
                until = wire.bytes + size * (0.25 if packed and version > 1 else 0.9) * rng.random()
                while wire.bytes < until and not fetching.done():
                    await asyncio.sleep(0.005)
                if not fetching.done():
                    wire.cut()
                    if version in here.versions():
                        errors.append(f"version {version} was complete before its transfer ended")
                    if done % 2:
                        fetching.cancel()
                        await asyncio.wait([fetching])
                    await asyncio.sleep(rng.uniform(0.1, 2.0))
                    wire.mend()
                    mended = time.perf_counter()
                    if done % 2:
                        fetching = asyncio.create_task(fetch(here, there, version, wire, packed, came))
                    await fetching
                    first += [min(when for when in came if when > mended) - mended]
                    done += 1
                    kinds["packed" if packed else "as it is"] += 1
                await fetching
                read = dict(here.read(version))
                if identity(here.parts(version)) != identity(there.parts(version)) or not all(
                    torch.equal(read[name], tensor) for name, tensor in model.items()
                ):
                    errors.append(f"version {version} differs from the version sent")
                for folder in (here, there):
                    for old in folder.versions()[:-1]:
                        folder.remove(old)
    return {
        **{"injected": {"cut": done}, "versions": version, "megabytes": round(size / 1e6, 1), "how": kinds},
        "first_chunk_after_s": [short(float(np.median(first))), short(max(first))],
        "faults": errors,
    }


# ---- output ----


def totals(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums over all runs."""
    rows = list(rows)
    summed = {
        name: sum((Counter(row.get(name, {})) for row in rows), Counter[str]())
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
    quick: Annotated[bool, typer.Option(help="one short run (five minutes), and two cuts")] = False,
    runs: Annotated[int | None, typer.Option(help="maximum number of new runs; 0: only print finished runs")] = None,
    repeats: Annotated[int, typer.Option(help="runs of each preset and of the link")] = 5,
    again: Annotated[bool, typer.Option(help="recompute the rows of finished runs")] = False,
    out: Annotated[Path, typer.Option(help="folder of the runs")] = Path("runs/faults"),
) -> None:
    """Train with faults, check the runs, print their rows."""
    chosen = kinds or list(KINDS)
    if unknown := sorted(set(chosen) - set(KINDS)):
        raise typer.BadParameter(f"unknown kind {'; '.join(unknown)}; known: {'; '.join(KINDS)}")
    wanted = [cell for cell in cells(chosen, 1 if quick else repeats) if not quick or cell.setting != "full"]
    epochs = 2 if quick else EPOCHS
    each = {kind: 1 if quick else count for kind, count in WANTED.items() if kind in chosen}
    kept = Kept(out)
    out.mkdir(parents=True, exist_ok=True)
    about = {"benchmark": "faults", "machine": describe(), "commit": commit()}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a run's processes end with this one

    def make(cell: Cell) -> dict[str, Any] | None:
        if cell.setting != _LINK:
            injected = train(cell, out, each, epochs)
            return {**about, **measure(cell, cell.folder(out), injected, epochs)}
        if why := far_link.missing():
            typer.echo(f"skipping the link: it {why}", err=True)
            return None
        with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
            result = asyncio.run(cuts(cell.seed, 2 if quick else CUTS, Path(root)))
        return {**about, "setting": cell.setting, "arm": cell.arm, "seed": cell.seed, **result}

    if again:
        rows: list[dict[str, Any]] = []
        for cell, row in kept.by_cell():
            folder = cell.folder(out)
            if folder.exists():
                measured = measure(cell, folder, summarize(Injector(folder, {}, cell.seed)), epochs)
                row = {**row, **measured, "measured_by": commit()}
            rows.append(row)
        kept.replace(rows)
    shown = kept.complete(wanted, runs, make, lambda row: as_json or print(_line(row), flush=True))
    if shown is None:
        return
    for row in [*(shown if as_json else []), {**about, **totals(shown)}]:
        print(json.dumps(row) if as_json else _line(row), flush=True)


if __name__ == "__main__":
    app()
