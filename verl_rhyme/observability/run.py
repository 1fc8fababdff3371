"""A run, as its folder has it: metrics by step, event log, and their summary."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from verl_rhyme.config import STOCK
from verl_rhyme.observability import events, metrics, slot_time, steps
from verl_rhyme.observability.slot_time import SlotTime
from verl_rhyme.observability.step_factor import step_factor
from verl_rhyme.observability.summary import summarize
from verl_rhyme.planning.cost import StepCost

EVENTS_FOLDER = "events"
#: File in a checkpoint folder that names its run (``checks/preflight/run_folder.py``).
MARKER_FILE = "run.json"
#: Config that hydra writes below a run folder, in the recipes.
CONFIG_FILE = Path("hydra", ".hydra", "config.yaml")


class ReportError(ValueError):
    """Run folder without data to report; the message names the missing files."""


@dataclass
class Run:
    folder: Path
    summary: dict[str, Any]  # of :func:`~verl_rhyme.observability.summary.summarize`
    steps: steps.Steps  # metrics of the finished steps
    requests: dict[str, np.ndarray]  # columns of ``events.REQUESTS``
    stages: dict[str, np.ndarray]  # columns of ``events.STAGES``
    slot_time: SlotTime | None  # ``None`` if the log has no times
    runs_on: bool  # whether engines continue while the actor trains
    problems: list[str]  # missing data, one sentence each

    @property
    def name(self) -> str:
        """Name of the run, unique in the report."""
        return str(self.summary["run"])

    @name.setter
    def name(self, name: str) -> None:
        self.summary["run"] = name

    @property
    def epochs(self) -> Sequence[Mapping[str, Any]]:
        return self.summary["epochs"]

    def by_step(self, *names: str) -> list[tuple[float, float]]:
        values = ((step, metrics.finite(data, *names)) for step, data in self.steps.items())
        return [(float(step), value) for step, value in values if value is not None]


def read(
    folder: str | os.PathLike[str], name: str | None = None, events_folder: str | os.PathLike[str] | None = None
) -> Run:
    """Read a run and its summary. The event log has all metrics of a run; a stock run has those of verl's ``file``
    logger only. Warnings and missing data become problems of the run.

    The default ``name`` is that of the event log or the marker of the checkpoint folder; ``events_folder`` is by
    default ``events`` in the run folder or in a folder of it. Raises ReportError without metrics of a training step.
    """
    run = Path(folder)
    if not run.is_dir():
        raise ReportError(f"no such folder: {run}; give a run folder that contains metrics.jsonl or checkpoints")
    log = Path(events_folder or _find_events(run))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_step = _metrics(run, log)
        requests, stages = (events.to_numpy(read(log)) for read in (events.read_requests, events.read_stages))
    info = events.read_info(log)
    slots, runs_on = info.get("slots"), info.get("rollout") == "step"
    measured = slot_time.measure(requests, stages, slots, runs_on)
    if runs_on and slots and measured is not None:
        for window in measured.windows:
            if window.step in by_step:
                by_step[window.step][metrics.BUBBLE_RATIO] = window.bubble(slots)
    run_name = name or ", then ".join(info.get("names", [])) or _marked_name(run) or STOCK
    summary = summarize(run_name, info, by_step)
    if calculated := info.get("step_cost"):
        summary["step_cost"] = calculated["source"]
        summary["step_factor"] = step_factor(requests, StepCost(**calculated["step"]))
    problems = [*dict.fromkeys(str(warning.message) for warning in caught)]
    if metrics.finite(by_step[max(by_step)], metrics.SLOW_TOOLS):
        problems.append(metrics.SLOW_TOOLS_ADVICE)
    if not log.is_dir():
        problems.append(f"{run} has no event log (events/ next to its checkpoints), so there are no lanes")
    elif measured is None:
        problems.append(f"the event log {log} has no times of requests and stages, so there are no lanes")
    elif not measured.logged:
        problems.append(
            f"{log / events.INFO_FILE} does not contain the request slots: lanes are as high as the most requests that "
            "ran at a time, and there is no bubble ratio"
        )
    return Run(run, summary, by_step, requests, stages, measured, runs_on, problems)


def _metrics(run: Path, log: Path) -> steps.Steps:
    path = run / steps.METRICS_FILE
    in_file, in_log = steps.from_metrics(path), events.read_metrics(log)
    by_step = {step: {**in_file.get(step, {}), **in_log.get(step, {})} for step in sorted({*in_file, *in_log})}
    if not by_step:
        raise ReportError(
            f"{run}: no finished training step in {path} or {log}; did the training start, and has a stock run 'file' "
            "in trainer.logger? See its log"
        )
    if not any(metrics.ROLLOUT_S in data for data in by_step.values()) and _stock_runs_on(run):
        for data in by_step.values():
            if (seconds := metrics.finite(data, metrics.STEP_S)) is not None:
                data[metrics.ROLLOUT_S] = seconds
    return by_step


def _stock_runs_on(run: Path) -> bool:
    """Whether this is a stock ``separate_async`` run, where ``timing_s/gen`` is only the time the trainer waited."""
    try:
        config = yaml.safe_load((run / CONFIG_FILE).read_text())
        return bool(config["trainer"]["v1"]["trainer_mode"] == "separate_async")
    except (OSError, yaml.YAMLError, LookupError, TypeError, UnicodeDecodeError):
        return False


def _find_events(run: Path) -> Path:
    direct, below = run / EVENTS_FOLDER, sorted(run.glob(f"*/{EVENTS_FOLDER}"))
    if direct.is_dir() or not below:
        return direct
    if len(below) > 1:
        raise ReportError(f"{run} contains several runs: give one of {', '.join(str(p.parent) for p in below)}")
    return below[0]


def _marked_name(run: Path) -> str | None:
    try:
        return str(json.loads(next(run.glob(f"*/{MARKER_FILE}")).read_text())["run"])
    except (StopIteration, OSError, ValueError, LookupError):
        return None
