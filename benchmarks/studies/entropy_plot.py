"""Draws acceptance length by the policy's entropy: ``results/draft_quality.jsonl`` and ``results/draft_losses.jsonl``.

python -m benchmarks.studies.entropy_plot docs/pictures/entropy.png
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

HERE = Path(__file__).parent
ARMS = {
    "adaptive floor 0.1": ("ours", "tab:red"),
    "arctic factor 1": ("suffix (arctic-inference)", "tab:blue"),
    "paper HistoSpec": ("HistoSpec as in the paper", "tab:green"),
    "ngram": ("ngram (vLLM)", "tab:gray"),
}
#: Marks of the pretrained model's traces, by the start of their names; those of one kind are joined.
MARKS = {"smollm2-worked": "s-", "smollm2-free": "D-", "smollm2-trained": "^"}
TINY = "o"


def entropies(trace: str) -> dict[str, float]:
    """Nats per token of the first epoch and of the later ones: minus the mean log-prob of what was sampled."""
    steps = traces.load(traces.FOLDER / f"{trace}.parquet")
    parts = {"first": [s for s in steps if s[0].epoch == 0], "later": [s for s in steps if s[0].epoch > 0]}
    return {
        name: -float(np.mean(np.concatenate([r.logprobs for step in part for r in step])))
        for name, part in parts.items()
    }


def kind(trace: str) -> str:
    """Traces of a kind are drawn alike."""
    return next((start for start in MARKS if trace.startswith(start)), "")


def main(out: Path) -> None:
    """Write the picture."""
    rows = [json.loads(line) for line in (HERE.parent / "results" / "draft_quality.jsonl").read_text().splitlines()]
    losses = [json.loads(line) for line in (HERE / "results" / "draft_losses.jsonl").read_text().splitlines()]
    at = {name: entropies(name) for name in sorted({row["trace"] for row in rows})}
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for axis, epochs in zip(axes, ("first", "later"), strict=True):
        for arm, (label, colour) in ARMS.items():
            mine = {r["trace"]: r["tokens_per_step"] for r in rows if r["arm"] == arm and r["epochs"] == epochs}
            for one in ("", *MARKS):
                points = sorted((at[name][epochs], y) for name, y in mine.items() if kind(name) == one)
                mark = MARKS.get(one, TINY)
                axis.plot(*zip(*points, strict=True), mark, color=colour, label="" if one else label)
        best = sorted(
            (at[row["trace"]][epochs], row["ceiling_likeliest"])
            for row in losses
            if row["epochs"] == epochs and "ceiling_likeliest" in row
        )
        axis.plot(*zip(*best, strict=True), "kx", label="always the policy's likeliest token")
        axis.set_title("first epoch" if epochs == "first" else "later epochs")
        axis.set_xlabel("entropy of the policy (nats per token)")
        axis.set_xscale("log")
        axis.set_xticks(ticks := (0.1, 0.2, 0.3, 0.5, 1.0, 2.0), [str(tick) for tick in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("acceptance length (tokens per decoding step)")
    axes[0].legend(fontsize=8)
    figure.suptitle(
        "SmolLM2-135M with few-shot examples (squares), without (diamonds), trained (triangles); tiny models (circles)",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    typer.run(main)
