"""The report's picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# Okabe and Ito's palette: told apart by the colour-blind too.
_COLOURS = ("#7f7f7f", "#0072b2", "#d55e00", "#009e73")


def draw(arms: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw reward, rollout speed and drafting per epoch, one colour per arm; a PNG at ``path``.

    Args:
        arms: Summaries as :func:`~verl_rhyme.observability.summary.read` makes them, the stock arm first. Those of
            one name are runs of one arm: their mean is drawn, and a band from the least to the greatest.
        path: Overwritten.
    """
    figure = Figure(figsize=(15, 6.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    ((reward, seconds, useful), (length, shares, bubble)) = figure.subplots(2, 3, sharex=True)
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for arm in arms:
        by_name.setdefault(arm["arm"], []).append(arm)
    colours = _COLOURS if len(by_name) > 1 else _COLOURS[1:]
    for (name, runs), colour in zip(by_name.items(), colours, strict=False):
        _line(reward, runs, "reward_mean", name, colour)
        _line(seconds, runs, "rollout_s", name, colour)
        _line(length, runs, "accept_length", name, colour)
        _line(shares, runs, "accept_rate", f"{name}: drafts accepted", colour)
        _line(shares, runs, "history_hit_rate", f"{name}: prompts with history", colour, linestyle="--", marker="s")
        _line(useful, runs, "useful_tokens_per_s", name, colour)
        _line(bubble, runs, "bubble_ratio", name, colour)

    for axes, title in (
        (reward, "mean reward"),
        (seconds, "rollout seconds per epoch"),
        (useful, "trained tokens per second of rollout"),
        (length, "acceptance length"),
        (shares, "shares"),
        (bubble, "idle request slots (bubble ratio)"),
    ):
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    for axes in (length, shares, bubble):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    seconds.set_ylim(bottom=0)
    length.set_ylim(bottom=0)
    useful.set_ylim(bottom=0)
    for axes in (shares, bubble):
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.savefig(path)


def _line(axes: Any, runs: Sequence[Mapping[str, Any]], key: str, label: str, colour: str, **style: Any) -> None:
    found: dict[int, list[float]] = {}
    for run in runs:
        for row in run["epochs"]:
            if row[key] is not None:
                found.setdefault(row["epoch"], []).append(row[key])
    if not found:
        return
    epochs, values = zip(*sorted(found.items()), strict=True)
    means = [fmean(each) for each in values]
    axes.plot(epochs, means, label=label, **{"color": colour, "marker": "o", "markersize": 4, **style})
    if len(runs) > 1:
        low, high = [min(each) for each in values], [max(each) for each in values]
        axes.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
