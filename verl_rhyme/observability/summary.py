"""Summary of a run by epoch, and comparison of two runs. Unknown values are null, never estimates."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import metrics
from .steps import Steps

#: First warm epoch; earlier ones are cold, because the history is still empty.
FIRST_WARM_EPOCH = 2

#: Columns of the table by epoch: key, title and format. They fit into a terminal of 80 columns.
_COLUMNS = (
    ("reward_mean", "reward", ".3f"),
    ("rollout_s", "rollout s", ".1f"),
    ("tokens", "tokens", ",d"),
    ("useful_tokens_per_s", "useful tok/s", ".0f"),
    ("bubble_ratio", "bubble", ".0%"),
    ("staleness_mean", "stale mean", ".2f"),
    ("staleness_max", "stale max", "d"),
    ("accept_length", "tokens per step", ".2f"),
    ("history_hit_rate", "history", ".0%"),
)

#: Names of verl-rhyme (by group) and of verl (by trajectory).
_STALENESS_MEAN = metrics.STALENESS_MEAN, metrics.VERL_STALENESS_MEAN
_STALENESS_MAX = metrics.STALENESS_MAX, metrics.VERL_STALENESS_MAX

Value = Callable[[Mapping[str, Any]], "float | None"]


def formatted(value: Any, form: str) -> str:
    if value is None:
        return "–"
    return format(int(value) if form.endswith("d") else value, form).replace(",", "\u202f")


def table(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the titles and rows of a table by epoch; columns without values are left out. With two runs, the second
    column has their ``names``, and the rows of an epoch follow each other.
    """
    columns = [c for c in _COLUMNS if any(row[c[0]] is not None for run in runs for row in run["epochs"])]
    found = []
    for number in sorted({row["epoch"] for run in runs for row in run["epochs"]}):
        rows = [(name, row) for name, run in zip(names, runs, strict=True) for row in run["epochs"]]
        for at, (name, row) in enumerate((name, row) for name, row in rows if row["epoch"] == number):
            lead = ["" if at else str(number), *([name] if len(runs) > 1 else [])]
            found.append([*lead, *(formatted(row[key], form) for key, _, form in columns)])
    return ["epoch", *(["run"] if len(runs) > 1 else []), *(title for _, title, _ in columns)], found


def summarize(name: str, info: Mapping[str, Any], by_step: Steps) -> dict[str, Any]:
    """Return the summary of a run from its metrics and the event log's ``info``.

    - ``run``: Name of the run; both if it resumed under another name.
    - ``staleness_mean``, ``staleness_max``: Staleness of the oldest token of each trained group, in policy versions,
      over all groups of the run. Without the pipeline: that of trajectories, as verl logs it.
    - ``bubble_slots``: Slots of the bubble ratios (:func:`~verl_rhyme.observability.metrics.fillable_slots`).
    - ``engine``: Engines of training and rollout.
    - ``epochs``: The values of :func:`_epoch`.
    - ``step_cost``, ``step_factor``: Source of the calculated seconds of a decode step, and the measured ones over
      them (:func:`~verl_rhyme.observability.step_factor.step_factor`); absent if model or GPU is unknown.
    """
    by_epoch: dict[int, list[dict[str, Any]]] = {}
    for data in by_step.values():
        by_epoch.setdefault(int(data[metrics.EPOCH]) + 1, []).append(data)
    return {
        "run": name,
        "epochs": [_epoch(number, rows) for number, rows in sorted(by_epoch.items())],
        **_staleness(list(by_step.values())),
        "bubble_slots": info.get("slots"),
        "engine": info.get("engine"),
    }


def compare(off: Mapping[str, Any], on: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two runs: ``{"runs": {name: summary}, "rollout_speedup_warm", "tokens_per_s_speedup_warm", ..._spread}``.

    The speedups are ratios of the median rollout seconds per epoch, and of the median response tokens per rollout
    second (lengths may differ), over the warm epochs of both runs; above 1 is faster. A spread is the least and the
    greatest ratio of an epoch. All are ``None`` without such epochs.
    """
    seconds = _paired(off, on, lambda row: row["rollout_s"])
    speed = [(after, before) for before, after in _paired(off, on, _tokens_per_s)]
    return {
        "runs": {off["run"]: dict(off), on["run"]: dict(on)},
        **_speedup("rollout_speedup_warm", seconds),
        **_speedup("tokens_per_s_speedup_warm", speed),
    }


def _epoch(number: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of an epoch from the metrics of its steps; ``tokens`` are those of all responses."""
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
    total, trained_total = _total(tokens), _total(trained)
    useful = metrics.useful_tokens_per_s(trained_total, rollout_s) if rollout_s and trained_total else None
    bubble = _mean(rows, metrics.BUBBLE_RATIO, weight=metrics.ROLLOUT_S)
    return {
        "epoch": number,  # from 1
        "reward_mean": _mean(rows, metrics.REWARD_MEAN, metrics.REWARD_MEAN_AFTER_KL, weight=metrics.REQUESTS),
        "rollout_s": rollout_s,  # of verl's ``timing_s/gen``; whole steps if rollout overlaps training
        "tokens": None if total is None else int(total),
        "accept_length": length,  # tokens of a verifying step; 1.0 without drafts
        "accept_rate": rate,  # accepted over drafted tokens
        "accepted_share": accepted / total if drafted and total and counted else None,
        "entropy": _mean(rows, metrics.ENTROPY, weight=metrics.TRAINED_TOKENS),
        "history_hit_rate": _mean(rows, metrics.HISTORY_HIT_RATE, weight=metrics.REQUESTS),
        "useful_tokens_per_s": useful,
        "bubble_ratio": None if useful is None else bubble,  # misleading without useful_tokens_per_s
        **_staleness(rows),
        "discarded_tokens": _count(rows, metrics.DISCARDED_TOKENS),  # generated, not trained
        "reverified_tokens": _count(rows, metrics.SPEC_REVERIFIED),  # of these, drafted and accepted again
        "drafted_by_source": {source: _count(rows, names[0]) for source, names in metrics.SPEC_SOURCES.items()},
        "accepted_by_source": {source: _count(rows, names[1]) for source, names in metrics.SPEC_SOURCES.items()},
        "tool_calls": _count(rows, metrics.TOOL_CALLS),
        "tool_share": _mean(rows, metrics.TOOL_SHARE, weight=metrics.REQUESTS),  # of the samples' time
        "prefilled_again": _count(rows, metrics.PREFILLED_AGAIN),  # tokens
        "waiting_max": _most(rows, metrics.WAITING_MAX),  # steps that passed a prompt by
        "migrated": _count(rows, metrics.PLACEMENT_MOVED),  # samples moved to another replica
        "length_rank_correlation": _mean(rows, metrics.LENGTH_CORRELATION, weight=metrics.REQUESTS),
    }


def _staleness(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    return {
        "staleness_mean": _mean(rows, *_STALENESS_MEAN, weight=metrics.STALENESS_GROUPS),
        "staleness_max": _most(rows, *_STALENESS_MAX),
    }


def _most(rows: Sequence[Mapping[str, Any]], *names: str) -> int | None:
    known = [value for row in rows if (value := metrics.finite(row, *names)) is not None]
    return int(max(known)) if known else None


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


def _tokens_per_s(row: Mapping[str, Any]) -> float | None:
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
