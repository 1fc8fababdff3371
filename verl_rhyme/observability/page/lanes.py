"""Lanes of replicas over time: filled slots, and reasons of idle slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import numpy as np

from verl_rhyme.observability.lanes import pack
from verl_rhyme.observability.page import svg
from verl_rhyme.observability.slot_time import REASONS, SYNC, TRAINING, TRAINING_STAGES, SlotTime

WIDTH, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 84, 52, 8, 40
#: Most lanes; more replicas share lanes.
LANES = 64
#: Most time bins of all lanes of a figure together, and of one lane.
_ALL_BINS, _BINS = 160_000, 24_000
#: Height of the trainer's lane.
_TRAINER = 12.0
#: Most rows of bars, and most bars; further replicas are left out.
ROWS, BARS = 320, 6000


#: Unit of time, its seconds, and the longest span that is shown in it.
_UNITS = (("s", 1.0, 1800.0), ("min", 60.0, 4 * 3600.0), ("h", 3600.0, float("inf")))
#: Largest overlap of two bars of a slot that is cut off, as a share of the figure's time.
_OVERLAP = 0.05
#: Gap between two bars, in the figure's units.
_APART = 1.2


@dataclass(frozen=True)
class _Bars:
    """Requests of a replica: their rows, the slots that show them, and their ends."""

    replica: int
    rows: np.ndarray
    lane: np.ndarray
    ends: np.ndarray

    @property
    def lanes(self) -> int:
        return int(self.lane.max()) + 1


def reason_class(code: int) -> str:
    return "r-" + REASONS[code].replace(" ", "-")


def overview(
    measured: SlotTime, begin: float, end: float, title: str, scale: float | None = None, origin: float = 0.0
) -> str:
    """Draw all lanes from ``begin`` to ``end``: the share of filled slots as an area over the reasons' colours.

    Args:
        measured: Slot time of the run.
        begin: First second shown.
        end: Last second shown.
        title: Title for screen readers.
        scale: Seconds that the width covers, to match another figure; at least ``end - begin``.
        origin: Zero of the time axis.
    """
    groups = np.array_split(np.arange(len(measured.replicas)), min(LANES, len(measured.replicas)))
    height = float(max(9, min(110, 260 // len(groups) + 4)))
    bins = min(_BINS, _ALL_BINS // len(groups))
    edges = np.linspace(begin, end, bins + 1)
    lanes = []
    for group in groups:
        slots = sum(measured.lane_slots(int(i)) for i in group)
        filled = np.sum([measured.occupied(int(i), edges) for i in group], axis=0) / slots
        lanes.append((_lane_name(measured, group), _area(filled, height), _mean_in_rollout(measured, group, slots)))
    gap = 3.0 if height > 14 else 1.5
    rows = [
        f'<g transform="translate(0 {svg.number(k * (height + gap))})">{area}</g>'
        for k, (_, area, _) in enumerate(lanes)
    ]
    trainer = _trainer(measured, begin, end)
    count = len(lanes) + bool(trainer)
    full = len(lanes) * (height + gap) - gap
    spaces = [
        svg.tag("rect", x=begin, y=k * (height + gap) - gap, width=end - begin, height=gap, class_="gap")
        for k in range(1, count)
    ]
    # Areas are drawn in bins, the rest of the plot in seconds.
    plot = _strips(measured, begin, end, full) + "".join(spaces)
    if trainer:
        plot += f'<g transform="translate(0 {svg.number(full + gap)})">{trainer}</g>'
    plot += f'<g transform="translate({begin!r} 0) scale({(end - begin) / bins!r} 1)">{"".join(rows)}</g>'
    names = [
        svg.label(_LEFT - 8.0, _TOP + k * (height + gap) + height / 2 + 3.5, name, text_anchor="end")
        + svg.label(WIDTH - _RIGHT + 8.0, _TOP + k * (height + gap) + height / 2 + 3.5, f"{100 * busy:.0f}%")
        for k, (name, _, busy) in enumerate(lanes)
        if height >= 9 or k % 2 == 0
    ]
    if trainer:
        names.append(svg.label(_LEFT - 8.0, _TOP + full + gap + _TRAINER - 2.0, "trainer", text_anchor="end"))
        full += gap + _TRAINER
    return _figure(plot, "".join(names), begin, max(end, begin + (scale or 0.0)), full, title, origin)


def detail(
    measured: SlotTime,
    begin: float,
    end: float,
    title: str,
    describe: Callable[[int], tuple[str, bool]],
    origin: float = 0.0,
) -> tuple[str, int]:
    """Draw each request as a bar in its slot, as far as space permits; return the SVG and the number of replicas shown.

    Args:
        measured: Slot time of the run.
        begin: First second shown.
        end: Last second shown.
        title: Title for screen readers.
        describe: Function from a row of the event log to its description and whether it was trained.
        origin: Zero of the time axis.
    """
    requests = measured.requests
    visible = (requests["finished"] > begin) & (requests["started"] < end)
    by_replica: list[_Bars] = []
    for replica, mine in enumerate(measured.by_replica):
        rows = mine[visible[mine]]
        if len(rows):
            lane, ends = pack(
                requests["started"][rows],
                requests["finished"][rows],
                round(measured.lane_slots(replica)),
                _OVERLAP * (end - begin),
            )
            by_replica.append(_Bars(replica, rows, lane, ends))
    by_replica.sort(key=lambda bars: (-bars.ends.max(), bars.replica))  # the others waited for the last replica
    chosen: list[_Bars] = []
    height = count = 0
    for bars in by_replica:
        height, count = height + bars.lanes, count + len(bars.rows)
        if chosen and (height > ROWS or count > BARS):
            break
        chosen.append(bars)
    chosen.sort(key=lambda bars: bars.replica)
    total = sum(bars.lanes for bars in chosen)
    apart = _APART * (end - begin) / WIDTH  # separates consecutive bars of a slot
    row = max(1.5, min(9.0, 560 / max(1, total)))
    top, parts, names, spaces = 0.0, [], [], []
    for bars in chosen:
        high = row * bars.lanes
        for at, slot, until in zip(bars.rows.tolist(), bars.lane.tolist(), bars.ends.tolist(), strict=True):
            started, finished = max(begin, requests["started"][at]), min(end, until)
            description, trained = describe(int(requests["row"][at]))
            width = max(0.0, finished - started - apart)
            place = f'x="{started:.6g}" y="{svg.number(top + row * slot)}" width="{width:.4g}"'
            faint = "" if trained else ' class="lost"'
            bar = f'<rect {place} height="{svg.number(row * 0.88)}"{faint}><title>{escape(description)}</title></rect>'
            parts.append(bar)
        names.append(
            svg.label(_LEFT - 8.0, _TOP + top + high / 2 + 3.5, _name(measured, bars.replica), text_anchor="end")
        )
        top += high
        spaces.append(svg.tag("rect", x=begin, y=top, width=end - begin, height=4.0, class_="gap"))
        top += 4.0
    top -= 4.0
    plot = _strips(measured, begin, end, top) + "".join(spaces[:-1]) + f'<g class="bars">{"".join(parts)}</g>'
    return _figure(plot, "".join(names), begin, end, top, title, origin), len(chosen)


def legend() -> str:
    """Return the legend of the colours."""
    keys = "".join(f'<span><i class="{reason_class(code)}"></i>{REASONS[code]}</span>' for code in range(len(REASONS)))
    return f'<div class="legend">{keys}</div>'


def _strips(measured: SlotTime, begin: float, end: float, height: float) -> str:
    """Draw the reasons of idle slots: one strip over all lanes for each interval."""
    strips: list[tuple[float, float, int]] = []
    first, last = np.searchsorted(measured.edges, [begin, end])
    for k in range(max(0, first - 1), min(len(measured.reason), last + 1)):
        left, right = max(begin, measured.edges[k]), min(end, measured.edges[k + 1])
        if right > left:
            why = int(measured.reason[k])
            if strips and strips[-1][2] == why and strips[-1][1] == left:
                strips[-1] = (strips[-1][0], right, why)
            else:
                strips.append((left, right, why))
    return "".join(
        f'<rect x="{a:.6g}" y="0" width="{b - a:.4g}" height="{svg.number(height)}" class="{reason_class(why)}"/>'
        for a, b, why in strips
    )


def _trainer(measured: SlotTime, begin: float, end: float) -> str:
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
        for a, b in zip(stages["started"][shown].clip(begin, end), stages["ended"][shown].clip(begin, end), strict=True)
        if b > a
    )


def _area(filled: np.ndarray, height: float) -> str:
    """Draw a stepped area in bins: one command per change."""
    tops = np.round(height * (1 - np.clip(filled, 0, 1)), 1)
    changes = np.flatnonzero(np.concatenate([[True], tops[1:] != tops[:-1]]))
    ends = np.append(changes[1:], len(tops))
    steps = "".join(f"V{tops[a]:g}H{b}" for a, b in zip(changes.tolist(), ends.tolist(), strict=True))
    return f'<path class="r-busy" d="M0 {svg.number(height)}{steps}V{svg.number(height)}Z"/>'


def _mean_in_rollout(measured: SlotTime, group: np.ndarray, slots: float) -> float:
    """Return the filled share of a group's slots during rollout."""
    edges = np.unique([t for window in measured.windows for t in (window.began, window.ended)])
    if len(edges) < 2:
        return 0.0
    middle = (edges[:-1] + edges[1:]) / 2
    within = np.zeros(len(middle), dtype=bool)
    for window in measured.windows:
        within |= (middle > window.began) & (middle < window.ended)
    spans = np.diff(edges)[within]
    filled = np.sum([measured.occupied(int(i), edges) for i in group], axis=0)[within]
    return float((filled * spans).sum() / (slots * spans.sum())) if spans.sum() > 0 else 0.0


def _name(measured: SlotTime, replica: int) -> str:
    return f"replica {measured.replicas[replica]}"


def _lane_name(measured: SlotTime, group: np.ndarray) -> str:
    first, last = measured.replicas[group[0]], measured.replicas[group[-1]]
    return f"replica {first}" if len(group) == 1 else f"{first} to {last}"


def _figure(plot: str, names: str, begin: float, end: float, height: float, title: str, origin: float) -> str:
    """Add labels around a plot whose unit is seconds, so that zooming only changes its view box."""
    span = end - begin
    width = float(WIDTH - _LEFT - _RIGHT)
    unit, size = next((u, s) for u, s, longest in _UNITS if span <= longest)
    marks = []
    for value in svg.ticks((begin - origin) / size, (end - origin) / size, 8):
        x = _LEFT + width * (value * size + origin - begin) / span
        marks.append(svg.tag("line", x1=x, x2=x, y1=_TOP + height, y2=_TOP + height + 4, class_="axis"))
        marks.append(svg.label(x, _TOP + height + 17, svg.short(value), text_anchor="middle"))
    base = svg.tag("line", x1=float(_LEFT), x2=_LEFT + width, y1=_TOP + height, y2=_TOP + height, class_="axis")
    what = f"time since the rollout began ({unit})" if origin else f"time ({unit})"
    under = svg.label(_LEFT + width / 2, _TOP + height + 34, what, "title", text_anchor="middle")
    inner = (
        f'<svg class="plot" x="{_LEFT}" y="{_TOP}" width="{svg.number(width)}" height="{svg.number(height)}" '
        f'viewBox="{begin!r} 0 {span!r} {svg.number(height)}" preserveAspectRatio="none" '
        f'data-origin="{origin!r}" data-unit="{size:g}">{plot}</svg>'
    )
    content = f'{inner}{names}{base}<g class="ticks">{"".join(marks)}</g>{under}'
    return svg.picture(content, WIDTH, _TOP + height + _BOTTOM, title, "lanes")
