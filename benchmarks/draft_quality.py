"""Measure drafts on recorded traces: acceptance length and verification overhead.

Acceptance length is emitted tokens per verify step. Overhead is verified tokens per emitted token. Both are 1 without
drafts.

Arctic's arms need its package: ``uv pip install --no-deps arctic-inference==0.3.0`` (compiles C++). Without it the
benchmark skips them and prints their names.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import traces
from benchmarks.arms import ARMS
from benchmarks.machine import print_row
from benchmarks.replay import Tally, replay

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def summary(tallies: list[Tally]) -> dict[str, float]:
    """Return figures over several epochs, with the range over single epochs."""
    emitted, drafted, accepted, steps = (
        sum(getattr(t, name) for t in tallies) for name in ("emitted", "drafted", "accepted", "steps")
    )
    single = [t.emitted / t.steps for t in tallies]
    per_request = np.concatenate([t.per_request for t in tallies])
    return {
        "tokens_per_step": round(emitted / steps, 3),
        "tokens_per_step_min": round(min(single), 3),
        "tokens_per_step_max": round(max(single), 3),
        "verified_per_token": round((drafted + steps) / emitted, 3),
        "drafted_per_token": round(drafted / emitted, 3),
        "accept_rate": round(accepted / drafted, 3) if drafted else 0.0,
        "longest_tokens_per_step": round(float(np.mean([x for t in tallies for x in t.longest])), 3),
        "us_per_request_step": round(1e6 * float(np.median(per_request)), 2),
    }


def available(arm: str) -> bool:
    return not arm.startswith("arctic") or importlib.util.find_spec("arctic_inference") is not None


@app.command()
def main(
    files: Annotated[list[Path] | None, typer.Argument(help="default: all in benchmarks/traces")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="two epochs of one trace, a few arms")] = False,
    arm: Annotated[list[str] | None, typer.Option(help="only these arms")] = None,
    slots: int = 64,
) -> None:
    """Replay traces with every arm."""
    if unknown := sorted(set(arm or ()) - set(ARMS)):
        raise typer.BadParameter(f"--arm: unknown {', '.join(unknown)}; known: {', '.join(ARMS)}")
    chosen = arm or list(ARMS)
    if quick:
        chosen = arm or ["none", "arctic factor 1", "paper HistoSpec", "adaptive floor 0.1"]
    skipped = [name for name in chosen if not available(name)]
    if skipped:
        print(f"skipped, arctic_inference is not installed: {', '.join(skipped)}", file=sys.stderr)
    paths = files or sorted(traces.FOLDER.glob("*.parquet"))
    for path in paths[:1] if quick else paths:
        steps = traces.load(path)
        if quick:
            steps = [step for step in steps if step[0].epoch < 2]
        if not as_json:
            print(
                f"\n{path.stem}\n{'arm':32} {'epochs':>7} {'accept len':>14} {'overhead':>12} {'accept':>7} {'us':>6}"
            )
        for name in chosen:
            if name in skipped:
                continue
            tallies = replay(steps, ARMS[name](), slots=slots)
            for epochs, part in (("first", [tallies[0]]), ("later", [t for e, t in tallies.items() if e > 0])):
                if part:
                    report(path.stem, name, epochs, summary(part), slots, as_json)


def report(trace: str, arm: str, epochs: str, figures: dict[str, Any], slots: int, as_json: bool) -> None:
    row = {"benchmark": "draft_quality", "trace": trace, "arm": arm, "epochs": epochs, "slots": slots, **figures}
    spread = (
        f"{figures['tokens_per_step']:.2f} ({figures['tokens_per_step_min']:.2f}-{figures['tokens_per_step_max']:.2f})"
    )
    line = f"{arm:32} {epochs:>7} {spread:>16} {figures['verified_per_token']:12.2f} {figures['accept_rate']:8.2f}"
    print_row(row, as_json, f"{line} {figures['us_per_request_step']:6.1f}")


if __name__ == "__main__":
    app()
