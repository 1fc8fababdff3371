"""SVG as text. Colours are classes of the page's style sheet, so they follow its theme."""

from __future__ import annotations

from html import escape


def number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


def tag(name: str, content: str = "", **attributes: object) -> str:
    """Return an element; ``class_`` becomes ``class``, underscores become hyphens, floats are rounded."""
    parts = [name]
    for key, value in attributes.items():
        text = number(value) if isinstance(value, float) else str(value)
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{escape(text)}"')
    return f"<{' '.join(parts)}>{content}</{name}>" if content else f"<{' '.join(parts)}/>"


def label(x: float, y: float, text: str, class_: str = "tick", **attributes: object) -> str:
    return tag("text", escape(text), x=float(x), y=float(y), class_=class_, **attributes)


def short(value: float) -> str:
    """Format a number for an axis: ``12k``, ``0.05``, ``3``."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return _signed(f"{value / (1e3 if unit == 'k' else size):.4g}{unit}")
    return _signed(f"{value:.4g}")


def _signed(text: str) -> str:
    return text.replace("-", "\u2212")


def percent(value: float) -> str:
    return f"{100 * value:.4g}%"


def picture(content: str, width: float, height: float, title: str, class_: str = "chart") -> str:
    box = f"0 0 {number(float(width))} {number(float(height))}"
    named = f"<title>{escape(title)}</title>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{class_}" viewBox="{box}" role="img" '
        f'aria-label="{escape(title)}">{named}{content}</svg>'
    )
