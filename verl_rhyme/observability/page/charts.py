"""The page's charts: curves over epochs and steps, stacked bars, scatters. Each is an SVG, or ``None`` without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from verl_rhyme.observability import metrics, steps
from verl_rhyme.observability.page import matched
from verl_rhyme.observability.page.lanes import reason_class
from verl_rhyme.observability.page.run import Run
from verl_rhyme.observability.page.svg import Axis, Chart, percent, short
from verl_rhyme.observability.slot_time import REASONS

Points = Sequence[tuple[float, float]]

#: Bars of a chart at most: more steps share one.
_BARS = 120
#: Dots of a scatter at most: a sample of more.
DOTS = 2500

#: What a step's seconds go to, with verl's timers.
STAGES = (
    ("rollout", ("gen",)),
    ("rewards, log-probs", ("reward", "old_log_prob", "ref", "values", "adv")),
    ("update", ("update_critic", "update_actor")),
    ("weight sync", ("update_weights", "switch_to_trainer", "switch_wait", "switch_to_rollout")),
    ("checkpoint, validation", ("save_checkpoint", "testing")),
)
#: The rest of a step.
REST = "rest"


def stage_class(name: str) -> str:
    return "g-" + name.split()[0].rstrip(",")


def curve(
    runs: Sequence[tuple[Run, Points]],
    y: str,
    x: str = "epoch",
    write: Callable[[float], str] = short,
    low: float | None = None,
    high: float | None = None,
) -> str | None:
    """A line with dots for each run that has points.

    Args:
        runs: With their points, in the order of their colours.
        y, x: What the axes measure, with units.
        write: How ticks of y are written.
        low, high: Ends of y; by default those of the points.
    """
    values = [value for _, points in runs for _, value in points]
    if not values:
        return None
    places = [place for _, points in runs for place, _ in points]
    chart = Chart(_whole(places, x), _around(values, y, write, low, high), f"{y} by {x}")
    for index, (run, points) in enumerate(runs):
        chart.line(points, f"s{index}")
        if len(points) <= _BARS:
            for place, value in points:
                told = f"{run.name}, {x} {place:g}: {write(value)}"
                chart.dot(place, value, f"s{index} dot", told, square=index == 1)
    return chart.draw()


def reward(runs: Sequence[Run]) -> str | None:
    """By step, thin, with the means of epochs over it."""
    lines = [(run, run.by_step(metrics.REWARD_MEAN, metrics.REWARD_MEAN_AFTER_KL, steps.EVENT_REWARD)) for run in runs]
    values = [value for _, points in lines for _, value in points]
    if not values:
        return None
    chart = Chart(
        _whole([place for _, points in lines for place, _ in points], "training step"),
        _around(values, "mean reward", short),
        "mean reward by training step",
    )
    for index, (_, points) in enumerate(lines):
        chart.line(points, f"s{index} thin")
    for index, (run, points) in enumerate(lines):
        epoch_of = {float(step): int(data[metrics.EPOCH]) + 1 for step, data in run.steps.items()}
        means = []
        for epoch in sorted(set(epoch_of.values())):
            mine = [point for point in points if epoch_of[point[0]] == epoch]
            if mine:
                means.append((float(np.mean([s for s, _ in mine])), float(np.mean([v for _, v in mine])), epoch))
        chart.line([(place, value) for place, value, _ in means], f"s{index}")
        for place, value, epoch in means:
            chart.dot(place, value, f"s{index} dot", f"{run.name}, epoch {epoch}: {value:.3f}", square=index == 1)
    return chart.draw()


def stages(run: Run, top: float | None = None) -> str | None:
    """Seconds of each step by :data:`STAGES`, stacked; ``top`` is the axis' end, where runs share one."""
    rows = stage_seconds(run)
    if not rows:
        return None
    bars = list(_shared_bars(rows))
    chart = Chart(
        Axis(bars[0][0] - 0.5, bars[-1][1] + 0.5, "training step", whole=True),
        Axis(0.0, top or max(sum(parts) for *_, parts in bars) * 1.05, "seconds a step"),
        f"where the steps' time of {run.name} goes",
    )
    layers = [(stage_class(name), name) for name in [*(name for name, _ in STAGES), REST]]
    for first, last, parts in bars:
        _stack(chart, first, last, parts, layers, "s")
    return chart.draw()


def stage_seconds(run: Run) -> list[tuple[int, list[float]]]:
    """(step, seconds of each stage and of the rest) of the steps that tell how long they took."""
    rows = []
    for step, data in run.steps.items():
        whole = metrics.finite(data, metrics.STEP_S)
        if whole is None:
            continue
        parts = [sum(metrics.finite(data, metrics.TIMING + timer) or 0.0 for timer in timers) for _, timers in STAGES]
        rows.append((int(step), [*parts, max(0.0, whole - sum(parts))]))
    return rows


def bubbles(run: Run) -> str | None:
    """Of each rollout, the parts of its slot seconds by reason."""
    measured = run.slot_time
    if measured is None or not measured.told:
        return None
    rows = []
    for window in measured.windows:
        seconds = [window.busy, *window.idle]
        if sum(seconds) > 0:
            rows.append((window.step, [value / sum(seconds) for value in seconds]))
    if not rows:
        return None
    bars = list(_shared_bars(rows))
    chart = Chart(
        Axis(bars[0][0] - 0.5, bars[-1][1] + 0.5, "training step", whole=True),
        Axis(0.0, 1.0, "share of rollout's slot time", write=percent),
        f"slot time of {run.name}'s rollouts",
    )
    layers = [(reason_class(code), name) for code, name in enumerate(REASONS)]
    for first, last, parts in bars:
        _stack(chart, first, last, parts, layers)
    return chart.draw()


def lengths(run: Run, index: int) -> str | None:
    """Predicted against real lengths, with the real ones' quantiles by predicted length."""
    predicted, real = run.lengths()
    if len(predicted) < 2:
        return None
    low, high = max(1.0, min(predicted.min(), real.min()) * 0.9), max(predicted.max(), real.max()) * 1.1
    chart = Chart(
        Axis(low, high, "predicted length (tokens)", log=True),
        Axis(low, high, "real length (tokens)", log=True),
        "predicted against real response lengths",
    )
    order = np.argsort(predicted, kind="stable")
    bins = [rows for rows in np.array_split(order, min(10, max(1, len(order) // 20))) if len(rows) >= 10]
    middle = [float(np.exp(np.log(predicted[rows]).mean())) for rows in bins]
    at = [np.quantile(real[rows], [0.1, 0.5, 0.9]) for rows in bins]
    dots = np.random.default_rng(0).permutation(len(real))[:DOTS]
    for k in dots.tolist():
        chart.dot(predicted[k], real[k], f"s{index} cloud", size=1.6)
    if len(bins) > 1:
        least, median, most = ([(x, float(q[k])) for x, q in zip(middle, at, strict=True)] for k in range(3))
        chart.band(least, most, f"s{index} band")
        chart.line(median, f"s{index}")
    chart.line([(low, low), (high, high)], "ideal")
    return chart.draw()


def calibration(run: Run) -> str | None:
    """Part of responses no longer than the 0.1, 0.5 and 0.9 quantiles of their forecasts, by epoch."""
    wanted = [(share, run.by_epoch(f"{metrics.LENGTHS}coverage_{round(100 * share)}")) for share in (0.1, 0.5, 0.9)]
    places = [place for _, points in wanted for place, _ in points]
    if not places:
        return None
    chart = Chart(
        _whole(places, "epoch"),
        Axis(0.0, 1.0, "responses no longer than the quantile", write=percent),
        "calibration of forecast lengths by epoch",
    )
    for k, (share, points) in enumerate(wanted):
        chart.line([(chart.x.low, share), (chart.x.high, share)], "ideal")
        chart.line(points, f"q{k}")
        for place, value in points:
            chart.dot(place, value, f"q{k} dot", f"quantile {share}, epoch {place:g}: {percent(value)}")
        chart.note(chart.x.high, share, f"{share:g}", dx="4", dy="3.5")
    return chart.draw()


def at_matched_lengths(
    runs: Sequence[Run], points: Sequence[list[matched.Point]], found: matched.Matched
) -> str | None:
    """Speed against mean length of each step, with the bins that are compared."""
    every = [point for each in points for point in each]
    if not every or any(not each for each in points):
        return None
    low, high = min(p.length for p in every), max(p.length for p in every)
    pad = 0.04 * (high - low) or 1.0
    chart = Chart(
        Axis(max(0.0, low - pad), high + pad, "mean response length of the step (tokens)"),
        Axis(0.0, 1.08 * max(p.speed for p in every), "tokens per second of rollout"),
        "tokens a second by mean response length, a dot a step",
    )
    for b in found.bins:
        chart.bar(max(b.low, chart.x.low), min(b.high, chart.x.high), chart.y.low, chart.y.high, "binned")
    for index, (run, each) in enumerate(zip(runs, points, strict=True)):
        for point in each:
            cold = " cold" if point.epoch < 2 else ""
            told = f"{run.name}, epoch {point.epoch}: {point.length:.0f} tokens, {point.speed:.0f} tokens/s"
            chart.dot(point.length, point.speed, f"s{index} dot{cold}", told, square=index == 1)
    for b in found.bins:
        for index, speed in enumerate((b.first_speed, b.second_speed)):
            chart.line([(max(b.low, chart.x.low), speed), (min(b.high, chart.x.high), speed)], f"s{index}")
    return chart.draw()


def _whole(places: Iterable[float], title: str) -> Axis:
    low, high = min(places := list(places)), max(places)
    pad = 0.04 * (high - low) or 0.5
    return Axis(low - pad, high + pad, title, whole=True)


def _around(
    values: Sequence[float],
    title: str,
    write: Callable[[float], str],
    low: float | None = None,
    high: float | None = None,
) -> Axis:
    least, most = min(values), max(values)
    pad = 0.08 * (most - least) or 0.05 * abs(most) or 0.5
    return Axis(least - pad if low is None else low, most + pad if high is None else high, title, write=write)


def _stack(
    chart: Chart, first: int, last: int, parts: Sequence[float], layers: Sequence[tuple[str, str]], unit: str = ""
) -> None:
    """A bar of some steps, as far as the axis reaches."""
    where = f"step {first}" if first == last else f"steps {first} to {last}, mean"
    base = 0.0
    for value, (class_, name) in zip(parts, layers, strict=True):
        top = min(base + value, chart.y.high)
        if top > base:
            told = f"{value:.2f} {unit}" if unit else percent(round(value, 3))
            chart.bar(first - 0.42, last + 0.42, base, top, class_, f"{where}, {name}: {told}")
        base = top


def _shared_bars(rows: Sequence[tuple[int, list[float]]]) -> Iterable[tuple[int, int, list[float]]]:
    """(first step, last step, mean parts), at most :data:`_BARS` of them."""
    each = -(-len(rows) // _BARS)
    for at in range(0, len(rows), each):
        mine = rows[at : at + each]
        yield mine[0][0], mine[-1][0], np.mean([parts for _, parts in mine], axis=0).tolist()
