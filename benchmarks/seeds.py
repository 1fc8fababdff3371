"""Compare stock verl and HistoSpec over several seeds: reward and rollout by epoch, with their spread.

    python -m benchmarks.seeds RUNS [--seed 1 --seed 2 ...] [--json] [--quick] [--plot PICTURE]

Runs ``recipes/run_tiny_cpu.sh`` for each seed and arm in a separate folder below RUNS; the order of the arms
alternates. A seed sets the puzzles, their order and the engine's noise. The arms of a seed train on the same prompts
with different samples. A second start skips finished runs.

Rewards are compared by the mean over seeds of (drafts - stock), with the standard error of that mean.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks import tiny_run
from benchmarks.machine import about, print_row
from verl_rhyme.observability.report import SUMMARY_FILE

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

OFF, ON = "off", "histospec"
#: Plotted values of an epoch's summary, with their titles.
PANELS = {
    "reward_mean": "mean reward",
    "rollout_s": "rollout seconds per epoch",
    "useful_tokens_per_s": "trained tokens per second of rollout",
    "accept_length": "acceptance length",
    "accept_rate": "drafts accepted",
    "history_hit_rate": "prompts with history",
}


def run(arm: str, seed: int, epochs: int, folder: Path) -> dict[str, Any]:
    """Make one training run unless it is finished; return its summary."""
    tiny_run.train(folder, {"RHYME": arm, "SEED": str(seed), "EPOCHS": str(epochs)}, (), timeout=3600)
    summary: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text())
    return summary


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return mean, minimum, maximum and, for several values, the standard error of the mean."""
    result = {"mean": fmean(values), "least": min(values), "greatest": max(values)}
    if len(values) > 1:
        result["standard_error"] = stdev(values) / math.sqrt(len(values))
    return {name: round(value, 4) for name, value in result.items()}


def _epochs(summaries: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], ...]]:
    """Return the rows of each epoch in all summaries."""
    return list(zip(*(summary["epochs"] for summary in summaries), strict=True))


def by_epoch(off: Sequence[dict[str, Any]], on: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per epoch from summaries paired by seed."""
    rows = []
    for before, after in zip(_epochs(off), _epochs(on), strict=True):
        pairs = list(zip(before, after, strict=True))
        rewards = {OFF: spread([a["reward_mean"] for a in before]), ON: spread([b["reward_mean"] for b in after])}
        rows.append(
            {
                "epoch": before[0]["epoch"],
                "reward": rewards,
                "reward_difference": spread([b["reward_mean"] - a["reward_mean"] for a, b in pairs]),
                "tokens_per_s_ratio": spread([b["useful_tokens_per_s"] / a["useful_tokens_per_s"] for a, b in pairs]),
                "rollout_s_ratio": spread([a["rollout_s"] / b["rollout_s"] for a, b in pairs]),
                "tokens_per_step": spread([b["accept_length"] for b in after]),
                "accept_rate": spread([b["accept_rate"] or 0.0 for b in after]),
            }
        )
    return rows


def draw(found: Mapping[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """Plot figures by epoch: each arm's mean over seeds, and a band from minimum to maximum."""
    figure = Figure(figsize=(15, 6.4), dpi=130, layout="constrained")
    for axes, (key, title) in zip(figure.subplots(2, 3, sharex=True).flat, PANELS.items(), strict=True):
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for (arm, summaries), colour in zip(found.items(), ("#7f7f7f", "#0072b2"), strict=True):
            rows = _epochs(summaries)
            values = np.array([[row[key] for row in each] for each in rows], dtype=float)
            epochs = [each[0]["epoch"] for each in rows]
            axes.plot(epochs, values.mean(axis=1), "o-", label=arm, color=colour, markersize=4)
            axes.fill_between(epochs, values.min(axis=1), values.max(axis=1), color=colour, alpha=0.15, linewidth=0)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


@app.command()
def main(
    runs: Annotated[Path, typer.Argument(help="folder of the runs, about 130 MB each")],
    seed: Annotated[list[int] | None, typer.Option(help="default: 1 to 5")] = None,
    epochs: Annotated[int, typer.Option(help="epochs of each run")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="one seed, two epochs (six minutes)")] = False,
    picture: Annotated[Path | None, typer.Option("--plot", help="PNG file to write")] = None,
) -> None:
    """Run both arms with each seed and compare them."""
    seeds = seed or ([1] if quick else [1, 2, 3, 4, 5])
    if sys.stdin.isatty():
        count = f"{2 * len(seeds)} training runs of {2 if quick else epochs} epochs"
        typer.confirm(f"usage: python -m benchmarks.seeds RUNS; {count} in {runs.resolve()}, start?", abort=True)
    found: dict[str, list[dict[str, Any]]] = {OFF: [], ON: []}
    for number, one in enumerate(seeds):
        for arm in (OFF, ON) if number % 2 == 0 else (ON, OFF):
            found[arm].append(run(arm, one, 2 if quick else epochs, runs.resolve() / f"{arm}-{one}"))
    measured = about("seeds")
    rows: list[dict[str, Any]] = [
        {**measured, "seed": one, "arm": arm, "epochs": summary["epochs"]}
        for arm, summaries in found.items()
        for one, summary in zip(seeds, summaries, strict=True)
    ]
    rows += [{**measured, "seeds": seeds, **row} for row in by_epoch(found[OFF], found[ON])]
    for row in rows if as_json else rows[len(seeds) * 2 :]:
        print_row(row, as_json)
    if picture is not None:
        draw(found, picture)


if __name__ == "__main__":
    app()
