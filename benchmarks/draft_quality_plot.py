"""Draws ``results/draft_quality.jsonl``: the frontier of acceptance length against verification overhead.

Of the tiny models; :mod:`benchmarks.entropy_plot` has the real one.

python -m benchmarks.draft_quality_plot docs/pictures/draft_quality.png
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import typer
from matplotlib import pyplot

from benchmarks.entropy_plot import REAL

RESULTS = Path(__file__).parent / "results" / "draft_quality.jsonl"
#: Arms that are one policy at several settings are one line.
_LINES = {"adaptive floor": ("adaptive (ours)", "tab:red"), "arctic factor": ("arctic-inference", "tab:blue")}
_POINTS = {"paper HistoSpec": "tab:green", "released HistoSpec": "tab:olive", "none": "black"}


def main(out: Path) -> None:
    """Write the picture."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    names = sorted({row["trace"] for row in rows if not row["trace"].startswith(REAL)})
    figure, axes = pyplot.subplots(2, len(names), figsize=(3.4 * len(names), 6), sharex=True, sharey="row")
    for column, name in enumerate(names):
        for line, epochs in enumerate(("first", "later")):
            axis = axes[line][column]
            chosen = [row for row in rows if row["trace"] == name and row["epochs"] == epochs]
            for prefix, (label, colour) in _LINES.items():
                points = sorted(
                    (row["verified_per_token"], row["tokens_per_step"])
                    for row in chosen
                    if row["arm"].startswith(prefix) and "epochs" not in row["arm"]
                )
                axis.plot(*zip(*points, strict=True), "o-", color=colour, label=label, markersize=4)
            for arm, colour in _POINTS.items():
                row = next(row for row in chosen if row["arm"] == arm)
                axis.plot(row["verified_per_token"], row["tokens_per_step"], "s", color=colour, label=arm)
            axis.set_title(f"{name}, {'first epoch' if epochs == 'first' else 'epochs 2 to 6'}", fontsize=9)
            axis.grid(alpha=0.3)
    for axis in axes[1]:
        axis.set_xlabel("verification overhead")
    for row_of_axes in axes:
        row_of_axes[0].set_ylabel("acceptance length")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    typer.run(main)
