"""What :mod:`benchmarks.sorted` says of a run, and of the runs of an arm together."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.real_run import short
from verl_rhyme.observability import metrics, steps
from verl_rhyme.observability.page.matched import Point, match
from verl_rhyme.simulation import recorded

#: What is seen of a run from outside, where somebody watches it, and the name of the bubble ratio there.
SAMPLED_FILE, SAMPLED = "sampled.jsonl", "rollout/bubble_ratio_sampled"
#: Held-out accuracies whose samples and seconds are told.
ACCURACIES = (0.14, 0.16, 0.18)
#: Names of a row's figures, as they are shown after a run.
TOLD = ("update_s", "tokens_per_s", "bubble_ratio", "response_length", "reward", "staleness_max", "wasted", "held_out")
_HEADINGS = (
    *("arm", "runs", "bubble", "trained tokens/s of rollout", "over `sync, drafts`, by seeds"),
    *("before the end", "of responses"),
    *("trained tokens/s", "s an update", "length", "wasted", "staleness", "held-out, by samples", "reward, by samples"),
)
#: Samples of an update, of the arms that others are compared by.
UPDATE = 64
#: Of the arms that others are compared with.
STOCK, DRAFTS = "sync", "sync, drafts"


def measure(folder: Path, samples: int, epoch: int, load: int) -> dict[str, Any]:
    """Figures of a run.

    Args:
        folder: The run's.
        samples: Of a step.
        epoch: Samples of one; figures of speed are of loads after the first that no validation came into: of a sorted
            rollout that would have the engine to itself in one arm, and beside a validation in another.
        load: Samples that a sorted rollout loads together.

    Returns:
        ``update_s``: seconds of :data:`UPDATE` trained samples, the same for all arms; ``tokens_per_s``: trained
        response tokens per second of steps, ``tokens_per_rollout_s`` of rollout; ``bubble_ratio``,
        ``bubble_ratio_sampled``: weighted by seconds of rollout, as the run tells and as it was seen from outside,
        which tells of stock verl, too; ``carried``: of these loads' tokens the share that had been made before them,
        less what was made in them for later ones (where prompts are loaded as others leave): in the three figures of
        speed the rollout is taken to have made these, too, at its pace;
        ``wasted``: tokens made and not trained, over those trained; ``staleness_max``: policy versions; ``held_out``:
        ``[samples, seconds, accuracy, score]`` of each validation; ``rewards``: ``[samples, seconds, mean reward]`` of
        each epoch's training, in which each prompt is trained once (where prompts are loaded by epochs); ``points``:
        mean response length and tokens per second of rollout, by loads, because what a sorted rollout trains in one
        step it may have generated in the one before; ``validating_s``: seconds that were added to those of
        ``held_out`` and ``rewards`` because engines generated for training while the trainer validated.

    Raises:
        ValueError: There is no such load.
    """
    sampled = folder / SAMPLED_FILE
    seen = dict(steps.parse_lines(sampled.read_bytes().splitlines(), sampled)) if sampled.is_file() else {}
    by_step = sorted(steps.from_metrics(folder / "metrics.jsonl").items())
    rows = [{**row, **seen.get(step, {})} for step, row in by_step]
    added = [0.0, *_validating(folder, len(rows))][: len(rows)]

    def column(name: str, of: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.float64]:
        return np.array([row.get(name, np.nan) for row in of], dtype=float)

    seconds = column(metrics.STEP_S, rows) + added
    if len(rows) > 1:  # in the first everything is warmed up
        seconds[0] = np.median(seconds[1:])
    ends = np.cumsum(seconds)
    size = epoch // samples
    first = min(size, len(rows) - 1)
    together = min(max(1, load // samples), len(rows) - first)
    loads = [
        slice(start, start + together)
        for start in range(first, len(rows) - together + 1, together)
        if not any(map(_held_out, rows[max(0, start - 1) : start + together - 1]))
    ]
    if not loads:
        raise ValueError(f"{folder}: a validation came into each load after the first epoch")
    warm = [row for load in loads for row in rows[load]]
    tokens, gen, step = (column(name, warm) for name in (metrics.RESPONSE_LENGTH_MEAN, metrics.GEN_S, metrics.STEP_S))
    tokens = tokens * samples
    load_tokens, load_gen = (values.reshape(-1, together).sum(axis=1) for values in (tokens, gen))
    load_made = load_tokens + _carried(folder, [[number for number, _ in by_step[load]] for load in loads])
    made = load_made.sum()
    rollout = gen.sum() * tokens.sum() / made  # that all of what was trained would have taken
    whole = step.sum() - gen.sum() + rollout
    staleness = column("training/off_policy/trajectory_staleness_worst/max", rows)
    wasted = np.nansum(column(metrics.SORTED_DISCARDED, warm)) / tokens.sum()
    held_out = [
        [(step + 1) * samples, short(ends[step]), *map(short, found)]
        for step, row in enumerate(rows)
        if (found := _held_out(row))
    ]
    if before := _before_training(folder):
        held_out.insert(0, [0, 0.0, *map(short, before)])
    return {
        "steps": len(rows),
        "update_s": short(UPDATE * whole / (samples * len(warm))),
        "tokens_per_s": short(tokens.sum() / whole),
        "tokens_per_rollout_s": short(tokens.sum() / rollout),
        "carried": short(1 - made / tokens.sum()),
        "bubble_ratio": _bubble(warm, metrics.BUBBLE_RATIO),
        "bubble_ratio_sampled": _bubble(warm, SAMPLED),
        "wasted": short(wasted),
        "response_length": short(tokens.sum() / (samples * len(warm))),
        "reward": short(column(metrics.REWARD_MEAN, rows[first:]).mean()),
        "staleness_max": short(np.nanmax(staleness)) if np.isfinite(staleness).any() else None,
        "waiting_max": short(np.max(column(metrics.SORTED_WAITING_MAX, rows))),
        "grad_norm": short(column("actor/grad_norm", warm).mean()),
        "acceptance_length": short(_acceptance(warm)),
        "validating_s": short(float(np.sum(added))),
        "held_out": held_out,
        "rewards": [
            [
                (stop + 1) * samples,
                short(ends[stop]),
                short(column(metrics.REWARD_MEAN, rows[stop + 1 - size : stop + 1]).mean()),
            ]
            for stop in range(size - 1, len(rows), size)
        ],
        "points": [
            [short(length), short(speed)]
            for length, speed in zip(load_tokens / (samples * together), load_made / load_gen, strict=True)
        ],
    }


def while_validating(run: recorded.Run) -> dict[int, float]:
    """Seconds of each step's validation in which requests of training ran."""
    request, stage = run.requests, run.stages
    known = ~request["validate"] & np.isfinite(request["started_at"]) & np.isfinite(request["finished_at"])
    began, ended = request["started_at"][known], request["finished_at"][known]
    found = {}
    for row in np.flatnonzero(stage["stage"] == "testing").tolist():
        start = float(stage["started_at"][row])
        end = start + float(stage["duration_s"][row])
        covered, until = 0.0, start
        for at in np.argsort(began, kind="stable"):
            covered += max(0.0, min(ended[at], end) - max(began[at], until))
            until = max(until, min(ended[at], end))
        found[int(stage["step"][row])] = float(covered)
    return found


def together(rows: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What the runs of each setting and arm say together: medians and, of some, the least and greatest; held-out
    figures as means over seeds with their standard errors; ``matched``: how many times the tokens per second of rollout
    of stock verl's :data:`STOCK`, where responses are equally long, by seed; ``tokens_over_drafts`` and
    ``responses_over_drafts``: how many times :data:`DRAFTS`' trained tokens, and trained responses, per second of
    rollout, however long responses are: where they are longer a slot that falls empty is rarer, so that tokens flatter
    the arm, and responses the other. ``before_end_over_drafts``: of the tokens, without either run's last load, in
    which rolling loads have nothing to load any more."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["setting"], row["arm"]), []).append(row)
    for (setting, arm), runs in groups.items():
        merged: dict[str, Any] = {"setting": setting, "arm": arm, "runs": len(runs)}
        for name in (*TOLD[:-1], "bubble_ratio_sampled", "tokens_per_rollout_s", "waiting_max"):
            values = np.array([np.nan if run[name] is None else run[name] for run in runs], dtype=float)
            merged[name] = short(float(np.median(values)))
            if name in ("update_s", "tokens_per_s", "bubble_ratio"):
                merged[f"{name}_range"] = [short(float(values.min())), short(float(values.max()))]
        stock = {run["seed"]: run for run in groups.get((setting, STOCK), [])}
        merged["matched"] = [
            short(match(_points(run), _points(stock[run["seed"]]), 1).ratio) for run in runs if run["seed"] in stock
        ]
        drafts = {run["seed"]: run for run in groups.get((setting, DRAFTS), [])}
        paired = [(run, drafts[run["seed"]]) for run in runs if run["seed"] in drafts]
        merged["tokens_over_drafts"] = [short(_speed(run) / _speed(other)) for run, other in paired]
        merged["before_end_over_drafts"] = [short(_before_end(run) / _before_end(other)) for run, other in paired]
        merged["responses_over_drafts"] = [
            short(_speed(run) / run["response_length"] / (_speed(other) / other["response_length"]))
            for run, other in paired
        ]
        merged["held_out"], merged["rewards"] = _curve(runs, "held_out"), _curve(runs, "rewards")
        merged["to_accuracy"] = {
            str(wanted): [reached(run["held_out"], wanted) for run in runs] for wanted in ACCURACIES
        }
        yield merged


def reached(held_out: Sequence[Sequence[float]], accuracy: float) -> list[float | None]:
    """Samples and seconds at the first validation of at least this accuracy, both ``None`` where there is none."""
    return next(([row[0], row[1]] for row in held_out if row[0] and row[2] >= accuracy), [None, None])


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of a table for each setting, of what :func:`together` gave; docs/studies/sorted.md has these."""
    for setting in dict.fromkeys(row["setting"] for row in rows):
        yield f"{setting}:\n"
        yield f"| {' | '.join(_HEADINGS)} |"
        yield "|" + "---|" * len(_HEADINGS)
        for row in rows:
            if row["setting"] != setting:
                continue
            held_out, rewards = (
                ", ".join(
                    f"{count}: {mean:.2f}" + (f" ± {error:.2f}" if error is not None else "")
                    for count, _, mean, error in row[name]
                )
                for name in ("held_out", "rewards")
            )
            told = [row["bubble_ratio_sampled"], row["bubble_ratio"]]
            bubble = next((f"{ratio:.0%}" for ratio in told if ratio is not None), "-")
            tokens, before_end, responses = (
                ", ".join(f"{ratio:.2f}" for ratio in row[f"{name}_over_drafts"]) or "-"
                for name in ("tokens", "before_end", "responses")
            )
            cells = [
                *(row["arm"], row["runs"], bubble, f"{row['tokens_per_rollout_s']:.0f}"),
                *(tokens, before_end, responses),
                *(f"{row['tokens_per_s']:.0f}", f"{row['update_s']:.1f}", f"{row['response_length']:.0f}"),
                *(f"{row['wasted']:.0%}", f"{row['staleness_max'] or 0:.0f}", held_out, rewards),
            ]
            yield f"| {' | '.join(map(str, cells))} |"
        yield ""


def _speed(run: Mapping[str, Any]) -> float:
    return float(run["tokens_per_rollout_s"])


def _before_end(run: Mapping[str, Any]) -> float:
    """Median tokens a second of the loads but the last one, where there are several."""
    loads = [float(speed) for _, speed in run["points"]]
    return float(np.median(loads[:-1] or loads))


def _curve(runs: Sequence[Mapping[str, Any]], name: str) -> list[list[float | None]]:
    """``[samples, seconds, accuracy or reward, its standard error]`` of what every run has."""
    counts = [{row[0]: row for row in run[name]} for run in runs]
    found = []
    for count in sorted(set.intersection(*(set(of) for of in counts))):
        values = np.array([of[count][1:3] for of in counts], dtype=float)
        error = values[:, 1].std(ddof=1) / math.sqrt(len(runs)) if len(runs) > 1 else None
        found.append([count, short(values[:, 0].mean()), short(values[:, 1].mean()), short(error)])
    return found


def _points(run: Mapping[str, Any]) -> list[Point]:
    return [Point(length, speed, 1) for length, speed in run["points"]]


def _carried(folder: Path, loads: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]:
    """Of each load, tokens that were made in its steps and are trained later, less those that were made before; zeros
    of a run without an event log, where each step trains what it made."""
    try:
        run = recorded.read(folder)
    except recorded.RunError:
        return np.zeros(len(loads))
    return np.array([carried(run, load[0], load[-1]) for load in loads], dtype=float)


def carried(run: recorded.Run, first: int, last: int) -> float:
    """Tokens that the rollouts of steps ``first`` to ``last`` made for later ones, less what they had from before.

    What comes between two rollouts (samples start while the trainer validates) is the next one's from before.
    """
    stage, request = run.stages, run.requests
    began, ended = stage["started_at"], stage["started_at"] + stage["duration_s"]

    def made(moment: float, step: int) -> float:
        later = request["trained"] & ~request["validate"] & (request["step"] >= step)
        return float(request["response_tokens"][later & (request["finished_at"] < moment)].sum())

    rollout = stage["stage"] == "gen"
    before, after = (began[rollout & (stage["step"] == first)], ended[rollout & (stage["step"] == last)])
    return made(after.max(), last + 1) - made(before.min(), first)


def _validating(folder: Path, count: int) -> list[float]:
    """:func:`while_validating`, by step; zeros of a run without an event log, whose engines then only validate."""
    try:
        found = while_validating(recorded.read(folder))
    except recorded.RunError:
        found = {}
    return [found.get(step, 0.0) for step in range(1, count + 1)]


def _held_out(row: Mapping[str, Any]) -> list[float]:
    """Accuracy and score of a validation; empty where there was none."""
    found = []
    for kind, name in (("val-core/", "/acc/mean@"), ("val-aux/", "/score/mean@")):
        found += [float(value) for key, value in row.items() if key.startswith(kind) and name in key]
    return found


def _before_training(folder: Path) -> list[float]:
    """As :func:`_held_out`, of the untrained model."""
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["step"] == 0:
            return _held_out(row["data"])
    return []


def _bubble(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Mean of the steps that have it, weighted by their seconds of rollout."""
    known = [(ratio, row[metrics.GEN_S]) for row in rows if (ratio := metrics.finite(row, name)) is not None]
    if not known:
        return None
    ratios, seconds = np.array(known, dtype=float).T
    return short(float(np.average(ratios, weights=seconds)))


def _acceptance(rows: Sequence[Mapping[str, Any]]) -> float:
    accepted, verified = (
        sum(row.get(name) or 0.0 for row in rows) for name in (metrics.SPEC_ACCEPTED, metrics.SPEC_VERIFY_STEPS)
    )
    return 1 + accepted / verified if verified else 1.0
