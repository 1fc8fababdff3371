"""Replicas over time: a lane for each, with its filled slots, samples in tools, and the reasons of idle slots."""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import MaxNLocator

from verl_rhyme.observability.page import svg
from verl_rhyme.observability.slot_time import BUSY, REASONS, SYNC, TOOL, TRAINING, TRAINING_STAGES, SlotTime

WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 84, 52, 8, 40
#: Most lanes; more replicas share lanes.
LANES = 64
#: Most time bins of all lanes of a figure together, and of one lane.
_ALL_BINS, _BINS = 160_000, 24_000
#: Height of the trainer's lane.
_TRAINER = 12.0
#: Unit of time, its seconds, and the longest span that is shown in it.
_UNITS = (("s", 1.0, 1800.0), ("min", 60.0, 4 * 3600.0), ("h", 3600.0, float("inf")))


def reason_class(code: int) -> str:
    return "r-" + REASONS[code].replace(" ", "-")


def draw(measured: SlotTime, title: str, scale: float) -> str:
    """Draw all lanes: the share of filled slots as an area over the reasons' colours. The width covers ``scale``
    seconds, to match another run's figure; ``title`` is for screen readers.
    """
    end = measured.ended
    groups = np.array_split(np.arange(len(measured.replicas)), min(LANES, len(measured.replicas)))
    height = float(max(9, min(110, 260 // len(groups) + 4)))
    bins = min(_BINS, _ALL_BINS // len(groups))
    edges = np.linspace(0.0, end, bins + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    rollout = np.any([(w.began < middle) & (middle < w.ended) for w in measured.windows], axis=0)
    lanes = []
    for group in groups:
        filled = np.mean([measured.occupied(int(i), edges) for i in group], axis=0) / measured.lane_slots
        away = np.mean([measured.away(int(i), edges) for i in group], axis=0) / measured.lane_slots
        busy = float(filled[rollout].mean()) if rollout.any() else 0.0
        areas = (_area(filled + away, height, TOOL) if away.any() else "") + _area(filled, height, BUSY)
        lanes.append((_lane_name(measured, group), areas, busy))
    gap = 3.0 if height > 14 else 1.5
    rows = [
        f'<g transform="translate(0 {svg.number(k * (height + gap))})">{area}</g>'
        for k, (_, area, _) in enumerate(lanes)
    ]
    trainer = _trainer(measured)
    full = len(lanes) * (height + gap) - gap
    spaces = [
        svg.tag("rect", x=0.0, y=k * (height + gap) - gap, width=end, height=gap, class_="gap")
        for k in range(1, len(lanes) + bool(trainer))
    ]
    # Areas are drawn in bins, the rest of the plot in seconds.
    plot = _strips(measured, full) + "".join(spaces)
    if trainer:
        plot += f'<g transform="translate(0 {svg.number(full + gap)})">{trainer}</g>'
    plot += f'<g transform="scale({end / bins!r} 1)">{"".join(rows)}</g>'
    names = [
        svg.label(_LEFT - 8.0, _TOP + k * (height + gap) + height / 2 + 3.5, name, text_anchor="end")
        + svg.label(WIDTH - _RIGHT + 8.0, _TOP + k * (height + gap) + height / 2 + 3.5, f"{100 * busy:.0f}%")
        for k, (name, _, busy) in enumerate(lanes)
    ]
    if trainer:
        names.append(svg.label(_LEFT - 8.0, _TOP + full + gap + _TRAINER - 2.0, "trainer", text_anchor="end"))
        full += gap + _TRAINER
    return _figure(plot, "".join(names), scale, full, title)


def legend() -> str:
    keys = "".join(f'<span><i class="{reason_class(code)}"></i>{REASONS[code]}</span>' for code in range(len(REASONS)))
    return f'<div class="legend">{keys}</div>'


def _strips(measured: SlotTime, height: float) -> str:
    """Draw the reasons of idle slots: a strip over all lanes for each stretch of time with one reason."""
    edges, reason = measured.edges, measured.reason
    begins = np.flatnonzero(np.concatenate([[True], reason[1:] != reason[:-1]]))
    ends = np.append(begins[1:], len(reason))
    return "".join(
        f'<rect x="{edges[a]:.6g}" y="0" width="{edges[b] - edges[a]:.4g}" height="{svg.number(height)}" '
        f'class="{reason_class(reason[a])}"/>'
        for a, b in zip(begins, ends, strict=True)
    )


def _trainer(measured: SlotTime) -> str:
    """Draw the trainer's lane if it trains during rollout; otherwise return "", because the strips show the same."""
    stages = measured.stages
    gen = stages["stage"] == "gen"
    rollout = dict(zip(stages["step"][gen].tolist(), stages["ended"][gen].tolist(), strict=True))
    trained = np.isin(stages["stage"], TRAINING_STAGES)
    whole = np.array([rollout.get(step, -np.inf) for step in stages["step"][trained].tolist()])
    if not (stages["started"][trained] < whole).any():
        return ""
    return "".join(
        svg.tag("rect", x=a, y=0.0, width=b - a, height=_TRAINER, class_=reason_class(why))
        for shown, why in ((trained, TRAINING), (stages["stage"] == "update_weights", SYNC))
        for a, b in zip(stages["started"][shown], stages["ended"][shown], strict=True)
        if b > a
    )


def _area(filled: np.ndarray, height: float, code: int) -> str:
    tops = np.round(height * (1 - np.clip(filled, 0, 1)), 1)
    changes = np.flatnonzero(np.concatenate([[True], tops[1:] != tops[:-1]]))
    ends = np.append(changes[1:], len(tops))
    steps = "".join(f"V{tops[a]:g}H{b}" for a, b in zip(changes.tolist(), ends.tolist(), strict=True))
    return f'<path class="{reason_class(code)}" d="M0 {svg.number(height)}{steps}V{svg.number(height)}Z"/>'


def _lane_name(measured: SlotTime, group: np.ndarray) -> str:
    first, last = measured.replicas[group[0]], measured.replicas[group[-1]]
    return f"replica {first}" if len(group) == 1 else f"{first} to {last}"


def _figure(plot: str, names: str, span: float, height: float, title: str) -> str:
    """Add labels around a plot whose unit is seconds, so that zooming only changes its view box."""
    width = float(WIDTH - _LEFT - _RIGHT)
    unit, size = next((u, s) for u, s, longest in _UNITS if span <= longest)
    marks = []
    for value in MaxNLocator(8, steps=[1, 2, 5, 10]).tick_values(0.0, span / size):
        if value * size > span:
            break
        x = _LEFT + width * value * size / span
        marks.append(svg.tag("line", x1=x, x2=x, y1=_TOP + height, y2=_TOP + height + 4, class_="axis"))
        marks.append(svg.label(x, _TOP + height + 17, svg.short(value), text_anchor="middle"))
    base = svg.tag("line", x1=float(_LEFT), x2=_LEFT + width, y1=_TOP + height, y2=_TOP + height, class_="axis")
    under = svg.label(_LEFT + width / 2, _TOP + height + 34, f"time ({unit})", "title", text_anchor="middle")
    inner = (
        f'<svg class="plot" x="{_LEFT}" y="{_TOP}" width="{svg.number(width)}" height="{svg.number(height)}" '
        f'viewBox="0 0 {span!r} {svg.number(height)}" preserveAspectRatio="none" data-unit="{size:g}">{plot}</svg>'
    )
    content = f'{inner}{names}{base}<g class="ticks">{"".join(marks)}</g>{under}'
    return svg.picture(content, WIDTH, _TOP + height + _BOTTOM, title, "lanes")
