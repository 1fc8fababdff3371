"""A run's table, ``summary.json`` and page, for one run or for two side by side."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import metrics, trace
from .page import document
from .page.run import Run
from .summary import FIRST_WARM_EPOCH, ReportError, compare, read, tokens_per_s

SUMMARY_FILE = "summary.json"
TRACE_FILE = "trace.json"


def report(
    folder: str,
    other: str | None = None,
    out: str | None = None,
    events: str | None = None,
    arm: str | None = None,
    step: int | None = None,
    perfetto: bool = False,
) -> int:
    """``verl-rhyme report``, whose arguments these are; its exit status."""
    console = Console()
    told: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            runs = [read(folder, arm, events)]
            if other is not None:
                runs.append(read(other))
                told += _told_apart(runs)
        except (ReportError, OSError) as error:
            _tell([str(error)])
            return 1
    told += [line for run in runs if (line := _no_step(run, step))]
    to = Path(out or runs[0].folder)
    try:
        summaries = [run.summary for run in runs]
        summary = compare(*reversed(summaries)) if len(runs) == 2 else summaries[0]
        told += _other_slots(summaries)
        paths = [write(summary, to), document.write(runs, to, FIRST_WARM_EPOCH, step)]
        if perfetto:
            paths += _traces(runs, to, step)
    except ReportError as error:
        _tell([*told, str(error)])
        return 1
    except OSError as error:
        _tell([*told, f"cannot write to {to} ({error.strerror or error}): give --out a folder that can be written"])
        return 1
    problems = [problem for run in runs for problem in run.problems]
    _tell([*dict.fromkeys([*told, *(str(warning.message) for warning in warned), *problems])])
    show(summary, console)
    for path in paths:
        console.print(str(path), highlight=False, markup=False, soft_wrap=True)
    return 0


def _other_slots(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """That bubble ratios are shares of other numbers of slots; of a stock run nobody knows."""
    slots = {summary["run"]: summary["bubble_slots"] for summary in summaries}
    if None in slots.values() or len(set(slots.values())) == 1:
        return []
    told = ", ".join(f"{arm} {count}" for arm, count in slots.items())
    return [f"bubble ratios are of the slots that a run can fill, which differ ({told}): they do not compare"]


def _no_step(run: Run, step: int | None) -> str:
    """What is wrong with a step that was asked for; empty where nothing is."""
    windows = [] if run.slot_time is None else run.slot_time.windows
    steps = [window.step for window in windows]
    if step is None or not steps or step in steps:
        return ""
    return f"{run.name}: no rollout of step {step} was logged; there are those of {min(steps)} to {max(steps)}"


def _told_apart(runs: Sequence[Run]) -> list[str]:
    """Runs of one arm get the names of their folders beside it.

    Raises:
        ReportError: They are one run.
    """
    first, second = runs
    if first.name != second.name:
        return []
    if first.folder.resolve() == second.folder.resolve():
        raise ReportError(f"{first.folder} and {second.folder} are one run: give another to hold it against")
    arm = first.name
    for depth in range(1, 1 + max(len(run.folder.resolve().parts) for run in runs)):
        names = ["/".join(run.folder.resolve().parts[-depth:]) for run in runs]
        if names[0] != names[1]:
            break
    for run, name in zip(runs, names, strict=True):
        run.name = f"{arm} ({name})"
    return [f"both runs are named {arm}: here they are {first.name} and {second.name}; --name names the first"]


def _traces(runs: Sequence[Run], out: Path, step: int | None) -> list[Path]:
    """A file for each run that has an event log, of all of it or of one step."""
    paths = []
    for run in runs:
        if run.slot_time is not None:
            path = out / (TRACE_FILE if run is runs[0] else f"other-{TRACE_FILE}")
            trace.write(path, *(_of_step(columns, step) for columns in (run.requests, run.stages)))
            paths.append(path)
    return paths


def _of_step(columns: Mapping[str, np.ndarray], step: int | None) -> Mapping[str, np.ndarray]:
    return columns if step is None else {name: values[columns["step"] == step] for name, values in columns.items()}


def _tell(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"verl-rhyme report: {problem}", file=sys.stderr)


def write(summary: Mapping[str, Any], out: str | os.PathLike[str]) -> Path:
    """Write a summary, of one run or a comparison; its path."""
    path = Path(out) / SUMMARY_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return path


def show(summary: Mapping[str, Any], console: Console) -> None:
    """Print the table per epoch, and the gain where there are two arms: RUN comes first, as in the page."""
    arms = _arms(summary)[::-1]
    names = [str(arm["run"]) for arm in arms]
    table = _table(arms, names)
    if len(names) > 1 and console.measure(table, options=console.options.update(width=1000)).maximum > console.width:
        for letter, name in zip("AB", names, strict=True):
            console.print(f"{letter}  {name}", highlight=False, markup=False, soft_wrap=True)
        table = _table(arms, list("AB"))
    console.print(table)
    for name, arm in zip(names, arms, strict=True):
        if (little := _little(arm)) is not None:
            console.print(f"{name}: {little}", highlight=False, markup=False, soft_wrap=True)
        if sources := _sources(arm):
            console.print(f"{name}: {sources}", highlight=False, markup=False, soft_wrap=True)
    if "rollout_speedup_warm" in summary:
        console.print(_gain(summary), highlight=False, markup=False)


def _little(arm: Mapping[str, Any]) -> str | None:
    """Of an arm whose drafts give next to nothing in its last epoch: that, and what to do."""
    last = arm["epochs"][-1] if arm["epochs"] else {}
    if (share := last.get("accepted_share")) is None or not last["history_hit_rate"]:
        return None
    line = metrics.little_from_drafts(share, 1.0, last["entropy"])
    return None if line is None else f"in its last epoch {line}; what to expect of which entropy: docs/drafting.md"


def _sources(run: Mapping[str, Any]) -> str:
    """Return where the draft tokens of a run's last epoch come from; empty where that is unknown."""
    last = run["epochs"][-1] if run["epochs"] else {}
    drafted, accepted = (metrics.shares(last.get(f"{kind}_by_source", {})) for kind in ("drafted", "accepted"))
    return f"draft tokens of the last epoch: {drafted}; accepted: {accepted}" if accepted else ""


def _table(arms: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    numbers_shown = ("reward", "rollout\nseconds", "tokens", "tokens\nper s", "tokens\nper step")
    shares_shown = ("accepted", "history", "bubble")
    stale = any(row["staleness_max"] for arm in arms for row in arm["epochs"])
    names_shown = (*numbers_shown, *shares_shown, *(["stale\n(max)"] if stale else []))
    for name in ("epoch", *(["run"] if len(arms) > 1 else []), *names_shown):
        table.add_column(name, justify="left" if name == "run" else "right", no_wrap=True)
    for number in sorted({row["epoch"] for arm in arms for row in arm["epochs"]}):
        rows = [(name, row) for name, arm in zip(names, arms, strict=True) for row in arm["epochs"]]
        for at, (name, row) in enumerate((name, row) for name, row in rows if row["epoch"] == number):
            lead = [str(number) if at == 0 else "", *([escape(name)] if len(arms) > 1 else [])]
            table.add_row(*lead, *_cells(row)[: len(names_shown)])
    return table


def _arms(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(summary["runs"].values()) if "runs" in summary else [summary]


def _cells(row: Mapping[str, Any]) -> list[str]:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        cell(row["reward_mean"], ".3f"),
        cell(row["rollout_s"], ".1f"),
        cell(row["tokens"], ",").replace(",", " "),
        cell(tokens_per_s(row), ".0f"),
        cell(row["accept_length"], ".2f"),
        *(cell(row[name], ".0%") for name in ("accept_rate", "history_hit_rate")),
        cell(row["bubble_ratio"], ".0%"),
        cell(row["staleness_mean"], ".1f") + ("" if row["staleness_max"] is None else f" ({row['staleness_max']})"),
    ]


def _gain(summary: Mapping[str, Any]) -> str:
    def factor(name: str) -> str:
        if summary[name] is None:
            return "unknown"
        low, high = summary[f"{name}_spread"]
        return f"{summary[name]:.2f}x ({low:.2f}-{high:.2f})"

    off, on = summary["runs"]
    if summary["rollout_speedup_warm"] is None and summary["tokens_per_s_speedup_warm"] is None:
        return f"{on} against {off}: speeds are compared from epoch {FIRST_WARM_EPOCH} on, which not both runs have"
    return (
        f"{on} against {off}, epochs from {FIRST_WARM_EPOCH} on, medians (least-greatest): "
        f"rollout speed {factor('rollout_speedup_warm')}, tokens per second {factor('tokens_per_s_speedup_warm')}"
    )
