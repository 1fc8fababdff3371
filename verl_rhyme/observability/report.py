"""Report of one run or two: table, ``summary.json`` and page."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Column, Table

from . import metrics, trace
from .page import document
from .run import ReportError, Run, read
from .summary import FIRST_WARM_EPOCH, compare, table

SUMMARY_FILE = "summary.json"
TRACE_FILE = "trace.json"


def report(
    folder: str,
    other: str | None = None,
    out: str | None = None,
    events: str | None = None,
    name: str | None = None,
    step: int | None = None,
    perfetto: bool = False,
) -> int:
    notes: list[str] = []
    try:
        runs = [read(folder, name, events)]
        if other is not None:
            runs.append(read(other))
            notes += _rename_equal(runs)
    except (ReportError, OSError) as error:
        _print_notes([str(error)])
        return 1
    to = Path(out or runs[0].folder)
    summaries = [run.summary for run in runs]
    summary = compare(*reversed(summaries)) if len(runs) == 2 else summaries[0]
    notes += _unequal_slots(summaries)
    try:
        to.mkdir(parents=True, exist_ok=True)
        (to / SUMMARY_FILE).write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
        paths = [to / SUMMARY_FILE, document.write(runs, to)]
        if perfetto:
            notes += [line for run in runs if (line := _missing_step(run, step))]
            paths += _traces(runs, to, step)
    except OSError as error:
        _print_notes([*notes, f"cannot write to {to} ({error.strerror or error}): set --out to a writable folder"])
        return 1
    _print_notes([*dict.fromkeys([*notes, *(problem for run in runs for problem in run.problems)])])
    show(summary)
    for path in paths:
        print(path)
    return 0


def _unequal_slots(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a note if the runs' bubble ratios refer to unequal numbers of slots (unknown in stock runs)."""
    slots = {summary["run"]: summary["bubble_slots"] for summary in summaries}
    if None in slots.values() or len(set(slots.values())) == 1:
        return []
    counts = ", ".join(f"{name} {count}" for name, count in slots.items())
    return [f"bubble ratios are not comparable: the runs can fill different numbers of request slots ({counts})"]


def _missing_step(run: Run, step: int | None) -> str:
    steps = run.requests["step"]
    if step is None or not len(steps) or step in steps:
        return ""
    return f"{run.name}: no request of step {step} was logged; steps {min(steps)} to {max(steps)} are available"


def _rename_equal(runs: Sequence[Run]) -> list[str]:
    """Append folder names to equal names of two runs; return a note. Raises ReportError if both are the same run."""
    first, second = runs
    if first.name != second.name:
        return []
    if first.folder.resolve() == second.folder.resolve():
        raise ReportError(f"{first.folder} and {second.folder} are the same run: give another run to compare with")
    name, folders = first.name, [run.folder.resolve() for run in runs]
    shared = os.path.commonpath(folders)
    for run, folder in zip(runs, folders, strict=True):
        run.name = f"{name} ({os.path.relpath(folder, shared)})"
    return [f"both runs are named {name}: here they are {first.name} and {second.name}; --name names the first"]


def _traces(runs: Sequence[Run], out: Path, step: int | None) -> list[Path]:
    paths = []
    for run in runs:
        if run.slot_time is not None:
            paths.append(out / (TRACE_FILE if run is runs[0] else f"other-{TRACE_FILE}"))
            trace.write(paths[-1], *(_of_step(columns, step) for columns in (run.requests, run.stages)))
    return paths


def _of_step(columns: Mapping[str, np.ndarray], step: int | None) -> Mapping[str, np.ndarray]:
    return columns if step is None else {name: values[columns["step"] == step] for name, values in columns.items()}


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"verl-rhyme report: {note}", file=sys.stderr)


def show(summary: Mapping[str, Any]) -> None:
    """Print the table by epoch, and the speedup of two runs: the first run comes first, as in the page."""
    runs = [*summary["runs"].values()][::-1] if "runs" in summary else [summary]
    letters = "AB"[: len(runs)]
    for letter, run in zip(letters, runs if len(runs) > 1 else [], strict=False):
        print(f"{letter}  {run['run']}")
    titles, rows = table(runs, letters)
    shown = Table(*(Column(title, justify="right") for title in titles), box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)
    for run in runs:
        lines = [_low_yield(run), _sources(run)]
        if factor := run.get("step_factor"):
            cost = run["step_cost"]
            lines.append(f"decode steps take {factor:.2f} times the {cost} (factor={factor:.2f} in plan files)")
        for line in filter(None, lines):
            print(f"{run['run']}: {line}")
    if "rollout_speedup_warm" in summary:
        print(_speedups(summary))


def _low_yield(run: Mapping[str, Any]) -> str | None:
    last = run["epochs"][-1] if run["epochs"] else {}
    if (share := last.get("accepted_share")) is None or not last["history_hit_rate"]:
        return None
    line = metrics.low_yield(share, 1.0, last["entropy"])
    return None if line is None else f"in its last epoch {line}; for the yield by entropy see docs/drafting.md"


def _sources(run: Mapping[str, Any]) -> str:
    last = run["epochs"][-1] if run["epochs"] else {}
    drafted, accepted = (metrics.shares(last.get(f"{kind}_by_source", {})) for kind in ("drafted", "accepted"))
    return f"draft tokens of the last epoch: {drafted}; accepted: {accepted}" if accepted else ""


def _speedups(summary: Mapping[str, Any]) -> str:
    def factor(name: str) -> str:
        if summary[name] is None:
            return "unknown"
        low, high = summary[f"{name}_spread"]
        return f"{summary[name]:.2f}x ({low:.2f}-{high:.2f})"

    off, on = summary["runs"]
    if summary["rollout_speedup_warm"] is None and summary["tokens_per_s_speedup_warm"] is None:
        return f"{on} against {off}: no speedup, because it needs epoch {FIRST_WARM_EPOCH} or later in both runs"
    return (
        f"{on} against {off}, epochs from {FIRST_WARM_EPOCH} on, medians (least-greatest): "
        f"rollout speed {factor('rollout_speedup_warm')}, tokens per second {factor('tokens_per_s_speedup_warm')}"
    )
