"""Measure presets and staleness bounds in the real stack: ``full``, the papers' presets, verl's modes with drafts.

    python -m benchmarks.systems [--json] [--quick] [--arm ARM] [--runs N] [--repeats 3] [--out DIR] [SETTING ...]

Real verl, vLLM and GRPO on the tiny world with three devices: engines and training share all three, or two have engines
and the third trains. The arms take turns. Each run has one seed, and its row is stored in ``--out``. A second start
skips finished runs, so ``--runs 1`` adds one run. When all runs are finished, or with ``--runs 0``, it prints each
run's row and the medians of each arm.

``rollout-bound``: a decoding step takes at least 150 ms. Training a sample takes 190 ms of one device, and its old
log-probability a third of that (:mod:`benchmarks.steady_step`), as on separate GPUs. Rollout then takes more than two
thirds of a synchronous step, as for most users. ``steady``: 60 and 150 ms; separate engines then wait for the trainer.

Speeds cover the steps from the second epoch on; figures from ``summary.json`` cover the training run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import tiny_run
from benchmarks.machine import about, print_row
from benchmarks.real_run import Cell, Kept, faults, requests_of, short
from benchmarks.tiny_run import ROLLOUT
from verl_rhyme.observability import metrics, steps
from verl_rhyme.observability.report import SUMMARY_FILE

DEVICES, BATCH, SAMPLES, SLOTS, LIMIT, STEPS_AN_EPOCH = 3, 9, 4, 6, 384, 4
TEMPERATURE = 0.6
#: Staleness bound of verl (``max_off_policy_threshold``).
VERLS = 8


@dataclass(frozen=True)
class Clock:
    """Minimum milliseconds of a decoding step, and of training a sample on one device."""

    step_ms: float
    train_ms: float
    epochs: int


SETTINGS = {"rollout-bound": Clock(150, 190, 3), "steady": Clock(60, 150, 4)}


@dataclass(frozen=True)
class Arm:
    """Preset with its ``max_staleness`` (for ``histospec``, verl's bound), and the share of prompts that tail batching
    delays."""

    preset: str
    staleness: int
    separate: bool = True
    put_off: float | None = None

    @property
    def ranks(self) -> int:
        """Number of devices that train."""
        return 1 if self.separate else DEVICES

    def settings(self) -> dict[str, str]:
        """Return the variables for the run script."""
        mode = "separate_async" if self.separate else "sync"
        replicas = DEVICES - 1 if self.separate else DEVICES
        dial = {} if self.preset == "histospec" else {"STALENESS": str(self.staleness)}
        return {"RHYME": self.preset, "MODE": mode, "REPLICAS": str(replicas), **dial}


ARMS = {
    "sync, drafts": Arm("histospec", 0, separate=False),
    "full, staleness 0": Arm("full", 0, separate=False),
    "tail batching": Arm("full", 0, separate=False, put_off=0.25),
    "sorted, staleness 0": Arm("sorted", 0, separate=False),
    "separate_async, drafts": Arm("histospec", VERLS),
    "full, staleness 1": Arm("full", 1),
    "full, staleness 2": Arm("full", 2),
    "stream, staleness 1": Arm("stream", 1),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def cells(settings: Iterable[str], repeats: int) -> Iterator[Cell]:
    """Yield the runs in order: by repeat, then setting, then arm."""
    return (Cell(setting, arm, seed) for seed in range(1, 1 + repeats) for setting in settings for arm in ARMS)


def train(cell: Cell, out: Path) -> None:
    """Make one training run."""
    arm, clock, folder = ARMS[cell.arm], SETTINGS[cell.setting], cell.folder(out)
    put_off = f"{ROLLOUT}.custom.rhyme.scheduling.put_off={arm.put_off}"
    settings = {"EPOCHS": str(clock.epochs), "PROMPTS": str(STEPS_AN_EPOCH * BATCH), "SEED": str(cell.seed)}
    overrides = [
        *tiny_run.sizes(BATCH, SAMPLES, SLOTS, arm.ranks),
        *([put_off] if arm.put_off else ()),
        *(f"{ROLLOUT}.temperature={TEMPERATURE}", "trainer.save_freq=-1"),
        # else each streamed part is padded to a micro-batch of the full batch
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={SAMPLES}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={SAMPLES}",
    ]
    shutil.rmtree(folder, ignore_errors=True)  # of an unfinished run
    train_ms = clock.train_ms / arm.ranks
    tiny_run.train(folder, settings | arm.settings(), overrides, clock.step_ms, timeout=1200, train_ms=train_ms)


def measure(cell: Cell, folder: Path) -> dict[str, Any]:
    """Return the figures of a run and the faults of :func:`.real_run.faults`."""
    summary = json.loads((folder / SUMMARY_FILE).read_text())
    by_step = steps.from_metrics(folder / "metrics.jsonl")
    counted = [row for step, row in by_step.items() if step > STEPS_AN_EPOCH]
    seconds = np.array([row[metrics.STEP_S] for row in counted])
    tokens = np.array([row[metrics.RESPONSE_LENGTH_MEAN] for row in counted]) * BATCH * SAMPLES
    epochs = summary["epochs"]
    return {
        "setting": cell.setting,
        "arm": cell.arm,
        "seed": cell.seed,
        "step_s": short(float(np.median(seconds))),
        "tokens_per_s": short(float(tokens.sum() / seconds.sum())),
        "staleness_mean": short(summary["staleness_mean"]),
        "staleness_max": summary["staleness_max"],
        "wasted_tokens": sum(epoch["discarded_tokens"] or 0 for epoch in epochs),
        "reward": [short(epoch["reward_mean"]) for epoch in epochs],
        "response_length": [short(epoch["tokens"] / (STEPS_AN_EPOCH * BATCH * SAMPLES)) for epoch in epochs],
        "bubble_ratio": [short(epoch["bubble_ratio"]) for epoch in epochs],
        "acceptance_length": [short(epoch["accept_length"]) for epoch in epochs],
        **faults(requests_of(folder), by_step, BATCH * SAMPLES, LIMIT, ARMS[cell.arm].staleness),
    }


def medians(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield medians over the runs of each setting and arm, with the range of speed and staleness."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["setting"], row["arm"]), []).append(row)
    for setting, arm in sorted(groups, key=lambda key: ([*SETTINGS].index(key[0]), [*ARMS].index(key[1]))):
        runs = groups[setting, arm]
        merged: dict[str, Any] = {"setting": setting, "arm": arm, "runs": len(runs)}
        for name in ("step_s", "tokens_per_s", "staleness_mean", "wasted_tokens"):
            values = np.array([run[name] for run in runs], dtype=float)  # None: nan
            merged[name] = short(float(np.median(values)))
            if name in ("tokens_per_s", "staleness_mean"):
                merged[f"{name}_range"] = [short(float(values.min())), short(float(values.max()))]
        for name in ("reward", "response_length", "bubble_ratio", "acceptance_length"):
            columns = np.array([run[name] for run in runs], dtype=float)
            merged[name] = [short(float(value)) for value in np.median(columns, axis=0)]
        merged["staleness_max"] = max((run["staleness_max"] for run in runs if run["staleness_max"]), default=0)
        merged["faults"] = sum(len(run["faults"]) for run in runs)
        yield merged


def _line(row: dict[str, Any]) -> str:
    name = f"seed {row['seed']}" if "seed" in row else f"{row['runs']} runs"
    return (
        f"{row['setting']:13} {row['arm']:24} {name}: step {row['step_s']} s, {row['tokens_per_s']} tokens/s, "
        f"staleness {row['staleness_mean']} (at most {row['staleness_max']}), length {row['response_length']}, "
        f"reward {row['reward']}, faults {row['faults'] or 'none'}"
    )


@app.command()
def main(
    settings: Annotated[list[str] | None, typer.Argument(help="default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="two arms, one seed (six minutes)")] = False,
    arm: Annotated[list[str] | None, typer.Option(help="repeat for several; default: all")] = None,
    runs: Annotated[int | None, typer.Option(help="maximum number of new runs; 0: only print finished runs")] = None,
    repeats: Annotated[int, typer.Option(help="runs of each arm")] = 3,
    out: Annotated[Path, typer.Option(help="folder of the runs")] = Path("runs/systems"),
) -> None:
    """Train, measure and print the rows."""
    chosen = settings or list(SETTINGS)
    for kind, given, known in (("setting", chosen, SETTINGS), ("arm", arm or (), ARMS)):
        if unknown := sorted(set(given) - set(known)):
            raise typer.BadParameter(f"unknown {kind} {'; '.join(unknown)}; known: {'; '.join(known)}")
    if quick:
        chosen, arm, repeats = chosen[:1], ["separate_async, drafts", "full, staleness 1"], 1
    wanted = [cell for cell in cells(chosen, repeats) if not arm or cell.arm in arm]
    origin = about("systems")

    def make(cell: Cell) -> dict[str, Any]:
        train(cell, out)
        return {**origin, **measure(cell, cell.folder(out))}

    shown = Kept(out).complete(wanted, runs, make, lambda row: as_json or print(_line(row), flush=True))
    if shown is None:
        return
    for row in [*(shown if as_json else []), *({**origin, "median": True, **row} for row in medians(shown))]:
        print_row(row, as_json, _line(row))


if __name__ == "__main__":
    app()
