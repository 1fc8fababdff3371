"""Charts of the page: curves and stacked bars. Each is an SVG, or ``None`` without data."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from verl_rhyme.observability import metrics
from verl_rhyme.observability.page.svg import percent, picture, short
from verl_rhyme.observability.run import Run
from verl_rhyme.observability.slot_time import REASONS

Points = Sequence[tuple[float, float]]

#: Most bars of a chart; more steps share bars. Lines of more points have no dots.
_BARS = 120
#: Size of a chart in points.
WIDTH, HEIGHT = 460, 250

_SHEET = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
#: Colours of the light theme by their names in the style sheet. Charts use the names, so they follow the theme.
COLOURS: dict[str, str] = dict(re.findall(r"--(\w+): (#\w{6});", _SHEET.partition("@media")[0]))
_DASHES = (0, (2.8, 1.7))

#: Stages of a step, with verl's timers.
STAGES = (
    ("rollout", ("gen",)),
    ("rewards, log-probs", ("reward", "old_log_prob", "ref", "values", "adv")),
    ("update", ("update_critic", "update_actor")),
    ("weight sync", ("update_weights", "switch_to_trainer", "switch_wait", "switch_to_rollout")),
    ("checkpoint, validation", ("save_checkpoint", "testing")),
)
#: Name of the rest of a step.
REST = "rest"
#: Colour names of :data:`STAGES` and the rest.
STAGE_COLOURS = ("busy", "logp", "check", "sync", "tail", "rest")


def curve(
    runs: Sequence[Points],
    y: str,
    x: str = "epoch",
    write: Callable[[float], str] = short,
    low: float | None = None,
) -> str | None:
    """Draw a line with dots for each run that has points; ``write`` formats the y ticks, ``low`` is the end of y."""
    if not any(runs):
        return None
    axes = _axes(x, y, write)
    for index, points in enumerate(runs):
        style: dict[str, Any] = {"marker": "os"[index], "markersize": 6} if len(points) <= _BARS else {}
        colour, dashes = COLOURS["ab"[index]], _DASHES if index else "-"
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=dashes, linewidth=1.8, clip_on=False, **style)
    axes.set_ylim(low)
    return _svg(axes, f"{y} by {x}")


def stages(run: Run, top: float) -> str | None:
    """Draw the seconds of each step by :data:`STAGES`, stacked; ``top`` is the end of the y axis, which runs share."""
    rows = stage_seconds(run)
    if not rows:
        return None
    axes = _axes("training step", "seconds per step")
    _stack(axes, rows, STAGE_COLOURS)
    axes.set_ylim(0.0, top)
    return _svg(axes, f"step time of {run.name} by stage")


def stage_seconds(run: Run) -> list[tuple[int, list[float]]]:
    """Return (step, seconds of each stage and of the rest) for steps with a logged duration."""
    rows = []
    for step, data in run.steps.items():
        whole = metrics.finite(data, metrics.STEP_S)
        if whole is None:
            continue
        parts = [sum(metrics.finite(data, metrics.TIMING + timer) or 0.0 for timer in timers) for _, timers in STAGES]
        rows.append((int(step), [*parts, max(0.0, whole - sum(parts))]))
    return rows


def bubbles(run: Run) -> str | None:
    measured = run.slot_time
    if measured is None or not measured.logged:
        return None
    rows = []
    for window in measured.windows:
        seconds = [window.busy, *window.idle]
        if sum(seconds) > 0:
            rows.append((window.step, [value / sum(seconds) for value in seconds]))
    if not rows:
        return None
    axes = _axes("training step", "share of rollout's slot time", percent)
    _stack(axes, rows, [reason.split()[-1] for reason in REASONS])
    axes.set_ylim(0.0, 1.0)
    return _svg(axes, f"slot time of {run.name}'s rollouts")


def _axes(x: str, y: str, write: Callable[[float], str] = short) -> Axes:
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
    figure.patch.set_visible(False)
    axes = figure.add_axes((54 / WIDTH, 40 / HEIGHT, 384 / WIDTH, 198 / HEIGHT), facecolor="none")
    axes.set_xlabel(x, color=COLOURS["ink"])
    axes.set_ylabel(y, color=COLOURS["ink"])
    axes.xaxis.set_label_coords(0.5, -0.12)
    axes.yaxis.set_label_coords(-0.11, 0.5)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(COLOURS["soft"])
    axes.tick_params(colors=COLOURS["soft"], length=4)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", color=COLOURS["rule"], linewidth=0.75)
    axes.set_axisbelow(True)
    axes.margins(0.04, 0.08)
    for axis, form, most, integer in ((axes.xaxis, short, 8, True), (axes.yaxis, write, 5, False)):
        axis.set_major_locator(MaxNLocator(most, integer=integer, steps=[1, 2, 5, 10], min_n_ticks=1))
        axis.set_major_formatter(FuncFormatter(lambda value, _, form=form: form(value)))
    return axes


def _stack(axes: Axes, rows: Sequence[tuple[int, list[float]]], colours: Sequence[str]) -> None:
    """Draw at most :data:`_BARS` stacked bars of one or more steps each."""
    each = -(-len(rows) // _BARS)
    shared = [rows[at : at + each] for at in range(0, len(rows), each)]
    edges = [*(mine[0][0] - 0.5 for mine in shared), rows[-1][0] + 0.5]
    base = np.zeros(len(shared))
    means = np.transpose([np.mean([parts for _, parts in mine], axis=0) for mine in shared])
    for values, colour in zip(means, colours, strict=True):
        axes.stairs(base + values, edges, baseline=base, fill=True, color=COLOURS[colour], linewidth=0)
        base = base + values
    axes.set_xlim(edges[0], edges[-1])


def _svg(axes: Axes, title: str) -> str:
    """Return the chart as an element of the page; equal charts give equal text."""
    output = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 11}):
        nothing = dict.fromkeys(("Date", "Format", "Type", "Creator"))
        axes.figure.savefig(output, format="svg", metadata=nothing)  # type: ignore[arg-type, union-attr]
    content = output.getvalue().partition("</style>")[2].partition("</defs>")[2].rpartition("</svg>")[0]
    content = re.sub(r'<g id="[^"]*"', "<g", content).replace("xlink:href", "href")
    content = re.sub(r"font[a-z-]*: [^;\"]*(; )?", "", content)  # the page sets fonts
    for name, colour in COLOURS.items():
        content = content.replace(colour, f"var(--{name})")
    return picture(re.sub(r"\n *", "\n", content), WIDTH, HEIGHT, title)
