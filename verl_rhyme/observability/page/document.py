"""Page as one file. It contains no time of writing, so equal runs give equal pages."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from html import escape
from pathlib import Path

from verl_rhyme import __version__
from verl_rhyme.observability.page import sections, words
from verl_rhyme.observability.run import Run

PAGE_FILE = "report.html"
_HERE = Path(__file__).parent


def write(runs: Sequence[Run], out: Path) -> Path:
    """Write the page of one run, or of two with different names."""
    path = out / PAGE_FILE
    path.write_text(page(runs), encoding="utf-8")
    return path


def page(runs: Sequence[Run]) -> str:
    name = escape(" vs. ".join(run.name for run in runs))
    body = [
        *sections.problems(runs),
        *sections.epochs(runs),
        *sections.replicas(runs),
        *sections.lengths(runs),
        *sections.drafting(runs),
        *sections.step_time(runs),
        *sections.training(runs),
        *sections.comparison(runs),
    ]
    style, script = ((_HERE / file).read_text(encoding="utf-8") for file in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{name}</title><style>{style}</style></head><body>"
        f"<header><h1>{name}</h1>{''.join(map(_about, runs))}</header><main>\n{''.join(body)}</main>"
        f'<footer class="about">verl-rhyme {escape(__version__)}. {words.FOOTER}</footer>'
        f"<script>{script}</script></body></html>\n"
    )


def _about(run: Run) -> str:
    engine = run.summary["engine"]
    parts = [run.name, *([engine] if engine else []), f"steps: {len(run.steps)}", f"epochs: {len(run.epochs)}"]
    if (measured := run.slot_time) is not None:
        parts += [f"replicas: {len(measured.replicas)}", f"request slots: {measured.slots}"]
        began = datetime.datetime.fromtimestamp(measured.origin, datetime.timezone.utc)
        parts.append(f"{began:%Y-%m-%d %H:%M} UTC")
    return f'<p class="about">{" · ".join(escape(part) for part in parts)}</p>'
