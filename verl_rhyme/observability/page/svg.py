"""SVG as text: plots with axes. Colours are classes of the page's style sheet, so that they follow its theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

#: Of a chart, in units of its own.
WIDTH, HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 22, 12, 40


def number(value: float) -> str:
    """As short as a hundredth of a unit needs."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


def tag(name: str, content: str = "", **attributes: object) -> str:
    """An element; ``class_`` is ``class``, underscores are hyphens, numbers are shortened."""
    parts = [name]
    for key, value in attributes.items():
        told = number(value) if isinstance(value, float) else str(value)
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{escape(told)}"')
    return f"<{' '.join(parts)}>{content}</{name}>" if content else f"<{' '.join(parts)}/>"


def label(x: float, y: float, text: str, class_: str = "tick", **attributes: object) -> str:
    return tag("text", escape(text), x=float(x), y=float(y), class_=class_, **attributes)


def short(value: float) -> str:
    """A number for an axis: ``12k``, ``0.05``, ``3``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return _signed(f"{value / (1e3 if unit == 'k' else size):.4g}{unit}")
    return _signed(f"{value:.4g}")


def _signed(text: str) -> str:
    return text.replace("-", "\u2212")


def percent(value: float) -> str:
    return f"{100 * value:.4g}%"


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> list[float]:
    """Round numbers within [low, high], about ``count``."""
    span = high - low
    if not span > 0:
        return [low]
    raw = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 and their tens; powers of ten alone where these are many."""
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(tens) <= 4 else (1,)
    return [m * 10.0**k for k in tens for m in steps if low <= m * 10.0**k <= high]


@dataclass
class Axis:
    """One axis: its range, what it measures (with the unit), and how its ticks are written."""

    low: float
    high: float
    title: str
    log: bool = False
    write: Callable[[float], str] = short
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.high > self.low:
            self.high = self.low * 2 if self.log else self.low + 1.0

    def place(self, value: float) -> float:
        """From 0 at the low end to 1 at the high one."""
        if self.log:
            return math.log(max(value, 1e-12) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, count: int) -> list[float]:
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high, count, self.whole)


@dataclass
class Chart:
    """A plot: marks are added, :meth:`draw` writes it.

    Args:
        x, y: Axes.
        title: Read out by screen readers.
    """

    x: Axis
    y: Axis
    title: str
    marks: list[str] = field(default_factory=list)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies."""
        return (
            _LEFT + self.x.place(x) * (WIDTH - _LEFT - _RIGHT),
            HEIGHT - _BOTTOM - self.y.place(y) * (HEIGHT - _TOP - _BOTTOM),
        )

    def line(self, points: Sequence[tuple[float, float]], class_: str) -> None:
        """Through the points; a line of its own for each run of them between gaps is the caller's care."""
        if len(points) > 1:
            told = " ".join(f"{number(a)},{number(b)}" for a, b in (self.at(*point) for point in points))
            self.marks.append(tag("polyline", points=told, class_=f"line {class_}"))

    def band(self, low: Sequence[tuple[float, float]], high: Sequence[tuple[float, float]], class_: str) -> None:
        """Between two lines of as many points."""
        around = [*low, *reversed(high)]
        told = " ".join(f"{number(a)},{number(b)}" for a, b in (self.at(*point) for point in around))
        self.marks.append(tag("polygon", points=told, class_=class_))

    def dot(self, x: float, y: float, class_: str, told: str = "", size: float = 3.0, square: bool = False) -> None:
        a, b = self.at(x, y)
        title = f"<title>{escape(told)}</title>" if told else ""
        if square:
            mark = tag("rect", title, x=a - size, y=b - size, width=2 * size, height=2 * size, class_=class_)
        else:
            mark = tag("circle", title, cx=a, cy=b, r=float(size), class_=class_)
        self.marks.append(mark)

    def bar(self, x0: float, x1: float, y0: float, y1: float, class_: str, told: str = "") -> None:
        (left, top), (right, bottom) = self.at(x0, y1), self.at(x1, y0)
        title = f"<title>{escape(told)}</title>" if told else ""
        width, height = max(0.2, right - left), max(0.0, bottom - top)
        self.marks.append(tag("rect", title, x=left, y=top, width=width, height=height, class_=class_))

    def note(self, x: float, y: float, text: str, **attributes: object) -> None:
        a, b = self.at(x, y)
        self.marks.append(label(a, b, text, "note", **attributes))

    def draw(self) -> str:
        """The SVG."""
        left, right, bottom = float(_LEFT), float(WIDTH - _RIGHT), float(HEIGHT - _BOTTOM)
        frame = [tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis")]
        for value in self.y.ticks(5):
            y = self.at(self.x.low, value)[1]
            frame.append(tag("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
            frame.append(label(left - 6, y + 3.5, self.y.write(value), text_anchor="end"))
        for value in self.x.ticks(8 if self.x.whole else 6):
            x = self.at(value, self.y.low)[0]
            frame.append(tag("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis"))
            frame.append(label(x, bottom + 16, self.x.write(value), text_anchor="middle"))
        frame.append(label((left + right) / 2, HEIGHT - 6.0, self.x.title, "title", text_anchor="middle"))
        middle = (_TOP + bottom) / 2
        turned = f"rotate(-90 12 {number(middle)})"
        frame.append(label(12.0, middle, self.y.title, "title", text_anchor="middle", transform=turned))
        return picture("".join(frame + self.marks), WIDTH, HEIGHT, self.title)


def picture(content: str, width: float, height: float, title: str, class_: str = "chart") -> str:
    """An SVG element that fills its column."""
    box = f"0 0 {number(float(width))} {number(float(height))}"
    named = f"<title>{escape(title)}</title>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{class_}" viewBox="{box}" role="img" '
        f'aria-label="{escape(title)}">{named}{content}</svg>'
    )
