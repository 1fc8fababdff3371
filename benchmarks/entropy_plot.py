"""Draws acceptance length by the policy's entropy: ``results/draft_quality.jsonl`` and ``results/draft_losses.jsonl``.

python -m benchmarks.entropy_plot docs/pictures/entropy.png
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import typer
from matplotlib import pyplot

from benchmarks import traces

RESULTS = Path(__file__).parent / "results"
ARMS = {
    "adaptive floor 0.1": ("ours", "tab:red"),
    "arctic factor 1": ("suffix (arctic-inference)", "tab:blue"),
    "paper HistoSpec": ("HistoSpec as in the paper", "tab:green"),
    "ngram": ("ngram (vLLM)", "tab:gray"),
}
#: Traces of this model are drawn as squares and joined.
REAL = "smollm2"


def entropy(trace: str) -> float:
    """Nats a token: minus the mean log-prob of what was sampled."""
    steps = traces.load(traces.FOLDER / f"{trace}.parquet")
    return -float(np.mean(np.concatenate([r.logprobs for step in steps for r in step])))


def main(out: Path) -> None:
    """Write the picture."""
    rows = [json.loads(line) for line in (RESULTS / "draft_quality.jsonl").read_text().splitlines()]
    losses = [json.loads(line) for line in (RESULTS / "draft_losses.jsonl").read_text().splitlines()]
    at = {name: entropy(name) for name in sorted({row["trace"] for row in rows})}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for axis, epochs in zip(axes, ("first", "later"), strict=True):
        for arm, (label, colour) in ARMS.items():
            mine = {r["trace"]: r["tokens_per_step"] for r in rows if r["arm"] == arm and r["epochs"] == epochs}
            for real, mark in ((True, "s"), (False, "o")):
                points = sorted((at[name], y) for name, y in mine.items() if name.startswith(REAL) == real)
                line = "-" if real else ""
                axis.plot(*zip(*points, strict=True), mark + line, color=colour, label=label if real else None)
        best = sorted(
            (at[row["trace"]], row["ceiling_likeliest"])
            for row in losses
            if row["epochs"] == epochs and "ceiling_likeliest" in row
        )
        axis.plot(*zip(*best, strict=True), "k--", label="the policy's likeliest token, always")
        axis.set_title("first epoch" if epochs == "first" else "later epochs")
        axis.set_xlabel("entropy of the policy (nats a token)")
        axis.set_xscale("log")
        axis.set_xticks(ticks := (0.1, 0.2, 0.3, 0.5, 1.0, 2.0), [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("tokens a decoding step (1: no drafts)")
    axes[0].legend(fontsize=8)
    figure.suptitle("squares: SmolLM2-135M, real text; circles: puzzles, routes and sums of tiny models", fontsize=9)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    typer.run(main)
