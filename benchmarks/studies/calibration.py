"""Is the drafter's confidence true? Predicted against observed acceptance on recorded traces.

    python -m benchmarks.studies.calibration [--json] [--quick] [--plot OUT.png] [TRACE.parquet ...]

Of every drafted token: the probability that the drafter gave to its being reached and accepted, and whether it was.
Each trace begins with a drafter that has learnt nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import traces
from benchmarks.arms import Rhyme
from benchmarks.machine import commit, describe
from benchmarks.replay import replay
from benchmarks.traces import Response
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting.adaptive import AdaptiveDrafter
from verl_rhyme.drafting.policy import DecodeStep

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

EDGES = np.array([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0])


class Watched(Rhyme):
    """Ours, and what became of every token that it drafted."""

    def __init__(self) -> None:
        super().__init__(DraftingConfig(floor=0.02, weigh_cost=False))
        self.predicted: list[np.ndarray] = []
        self.observed: list[np.ndarray] = []
        self._reach: dict[str, np.ndarray] = {}

    def step(self, responses: Sequence[Response], done: DecodeStep) -> list[list[int]]:
        for request, drafted, accepted in zip(done.requests, done.drafted, done.accepted, strict=True):
            if drafted:
                self.predicted.append(self._reach[request])
                self.observed.append(np.arange(drafted) < accepted)
        drafts = super().step(responses, done)
        assert isinstance(self.policy, AdaptiveDrafter)
        self._reach = dict(zip(done.requests, self.policy.reach, strict=True))
        return drafts


def classes(predicted: np.ndarray, observed: np.ndarray) -> list[dict[str, float]]:
    """Mean prediction, share accepted and number of tokens of each class of predictions."""
    which = np.clip(np.digitize(predicted, EDGES) - 1, 0, len(EDGES) - 2)
    return [
        {
            "predicted": round(float(predicted[which == i].mean()), 4),
            "accepted": round(float(observed[which == i].mean()), 4),
            "tokens": int((which == i).sum()),
        }
        for i in range(len(EDGES) - 1)
        if (which == i).sum() >= 50
    ]


@app.command()
def main(
    files: Annotated[list[Path] | None, typer.Argument(help="default: all in benchmarks/traces")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="two epochs of one trace")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw it, too")] = None,
) -> None:
    """Measure, print, and draw."""
    rows = []
    paths = files or sorted(traces.FOLDER.glob("*.parquet"))
    for path in paths[:1] if quick else paths:
        steps = traces.load(path)
        arm = Watched()
        replay([step for step in steps if step[0].epoch < 2] if quick else steps, arm)
        predicted, observed = np.concatenate(arm.predicted), np.concatenate(arm.observed)
        found = classes(predicted, observed)
        # The expected calibration error: how far off a class is, on the average of all tokens.
        error = sum(c["tokens"] * abs(c["predicted"] - c["accepted"]) for c in found) / len(predicted)
        row = {"benchmark": "calibration", "trace": path.stem, "error": round(error, 4), "classes": found}
        rows.append(row)
        print(json.dumps({**row, "machine": describe(), "commit": commit()}) if as_json else row, flush=True)
    if plot:
        draw(rows, plot)


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Reliability diagram."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 5), layout="constrained")
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for row in rows:
        found = row["classes"]
        axes.plot(
            [c["predicted"] for c in found],
            [c["accepted"] for c in found],
            marker="o",
            markersize=3,
            label=f"{row['trace']} (mean error {row['error']:.3f})",
        )
    axes.set(xlabel="predicted: reached and accepted", ylabel="observed", xlim=(0, 1), ylim=(0, 1))
    axes.legend(fontsize=8)
    figure.savefig(out, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    app()
