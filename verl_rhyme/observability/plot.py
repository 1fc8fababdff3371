"""The report's picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

# Okabe and Ito's palette: told apart by the colour-blind too.
_COLOURS = ("#7f7f7f", "#0072b2", "#d55e00", "#009e73")


def draw(arms: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw reward, rollout speed and drafting per epoch, one colour per arm; a PNG at ``path``.

    Args:
        arms: Summaries as :func:`~verl_rhyme.observability.report.summarize` makes them, the stock arm first.
        path: Overwritten.
    """
    figure = Figure(figsize=(10, 6.4), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    ((reward, seconds), (length, shares)) = figure.subplots(2, 2, sharex=True)
    colours = _COLOURS if len(arms) > 1 else _COLOURS[1:]
    for arm, colour in zip(arms, colours, strict=False):
        name = arm["arm"]
        _line(reward, arm, "reward_mean", name, colour)
        _line(seconds, arm, "rollout_s", name, colour)
        _line(length, arm, "accept_length", name, colour)
        _line(shares, arm, "accept_rate", f"{name}: drafts accepted", colour)
        _line(shares, arm, "history_hit_rate", f"{name}: prompts with history", colour, linestyle="--", marker="s")
        _line(shares, arm, "bubble_ratio", f"{name}: idle slots (bubble)", colour, linestyle=":", marker="^")

    for axes, title in (
        (reward, "mean reward"),
        (seconds, "rollout seconds per epoch"),
        (length, "tokens per decoding step"),
        (shares, "shares"),
    ):
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8)
    for axes in (length, shares):
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    seconds.set_ylim(bottom=0)
    length.set_ylim(bottom=0)
    shares.set_ylim(-0.03, 1.03)
    shares.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.savefig(path)


def _line(axes: Any, arm: Mapping[str, Any], key: str, label: str, colour: str, **style: Any) -> None:
    points = [(row["epoch"], row[key]) for row in arm["epochs"] if row[key] is not None]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **{"color": colour, "marker": "o", "markersize": 4, **style})
