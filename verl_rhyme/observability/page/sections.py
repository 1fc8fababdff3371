"""Sections of the page: HTML around figures. A section without data is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

import numpy as np

from verl_rhyme.observability import metrics
from verl_rhyme.observability.page import charts, matched, timeline, words
from verl_rhyme.observability.page.charts import Points
from verl_rhyme.observability.page.svg import percent
from verl_rhyme.observability.run import Run
from verl_rhyme.observability.slot_time import DEFINITIONS, REASONS, SlotTime
from verl_rhyme.observability.summary import FIRST_WARM_EPOCH, formatted, table

#: Name, SVG or ``None``, caption.
Figure = tuple[str, str | None, str]


def problems(runs: Sequence[Run]) -> Iterator[str]:
    listed = [(run, problem) for run in runs for problem in run.problems]
    if listed:
        items = "".join(f"<li>{escape(run.name)}: {escape(problem)}</li>" for run, problem in listed)
        yield f'<div class="problems"><b>Missing data</b><ul>{items}</ul></div>'


def epochs(runs: Sequence[Run]) -> Iterator[str]:
    titles, rows = table([run.summary for run in runs], [run.name for run in runs])
    lead = len(runs)  # columns of text
    yield _table(titles[:lead], titles[lead:], [(row[:lead], row[lead:]) for row in rows]) + _note(words.TABLE)


def replicas(runs: Sequence[Run]) -> Iterator[str]:
    known = [(run, run.slot_time) for run in runs if run.slot_time is not None]
    if not known:
        return
    yield "<h2>Replicas over time</h2>" + timeline.legend()
    scale = max(measured.ended for _, measured in known)
    for at, (run, measured) in enumerate(known):
        picture = timeline.draw(measured, f"Replicas of {run.name} over time", scale)
        height = words.ITS_SLOTS if measured.logged else words.MOST_REQUESTS
        caption = words.LANES.format(name=escape(run.name), height=height)
        if measured.pauses:
            caption += words.PAUSES.format(count=measured.pauses)
        yield _figure(f"lanes-{at + 1}", picture, caption + words.RUNS_ON * run.runs_on, wide=True)
    terms = (
        f'<dt><i class="{timeline.reason_class(code)}"></i>{name}</dt><dd>{escape(DEFINITIONS[name])}</dd>'
        for code, name in enumerate(REASONS)
    )
    yield f"<dl class=terms>{''.join(terms)}</dl>" + _shares(known)
    yield _pair(
        (f"bubbles-{at + 1}", charts.bubbles(run), words.BUBBLES.format(name=escape(run.name)))
        for at, run in enumerate(runs)
    )


def _shares(known: Sequence[tuple[Run, SlotTime]]) -> str:
    rows = []
    for run, measured in known:
        bubble = formatted(measured.bubble if measured.logged else None, ".3f")
        rows.append(([run.name, "of rollout"], [*(f"{share:.1%}" for share in measured.rollout_shares), bubble]))
        rows.append((["", "of all time"], [*(f"{share:.1%}" for share in measured.shares), ""]))
    return _table(["run", "share of slot time"], [*REASONS, "bubble ratio"], rows) + _note(words.SHARES)


def lengths(runs: Sequence[Run]) -> Iterator[str]:
    rank = [_column(run, "length_rank_correlation") for run in runs]
    if shown := _pair([("rank", charts.curve(rank, "rank correlation"), words.RANK)], runs):
        yield "<h2>Lengths</h2>" + shown


def drafting(runs: Sequence[Run]) -> Iterator[str]:
    accepted = [_column(run, "accept_length") for run in runs]
    if all(value == 1.0 for points in accepted for _, value in points):
        accepted = []  # no drafts
    rates = [_column(run, "accept_rate") for run in runs]
    figures = (
        ("accepted", charts.curve(accepted, "acceptance length (tokens)"), words.ACCEPTANCE_LENGTH),
        ("rate", charts.curve(rates, "accepted draft tokens", write=percent, low=0.0), words.ACCEPTANCE_RATE),
    )
    if shown := _pair(figures, runs):
        yield "<h2>Drafting from history</h2>" + shown


def step_time(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the stacked stages of the runs on one scale, which cuts off the slowest 2% of many steps."""
    sums = [sum(parts) for run in runs for _, parts in charts.stage_seconds(run)]
    if not sums:
        return
    top = 1.05 * float(np.quantile(sums, 0.98) if len(sums) >= 50 else max(sums))
    names = [*(name for name, _ in charts.STAGES), charts.REST]
    keys = "".join(
        f'<span><i style="background: var(--{colour})"></i>{name}</span>'
        for name, colour in zip(names, charts.STAGE_COLOURS, strict=True)
    )
    caption, on = words.STAGES, words.STAGES_ON
    figures = (
        (f"stages-{at + 1}", charts.stages(run, top), caption.format(name=escape(run.name), on=on * run.runs_on))
        for at, run in enumerate(runs)
    )
    yield f"<h2>Step time by stage</h2><div class=legend>{keys}</div>" + _pair(figures)


def training(runs: Sequence[Run]) -> Iterator[str]:
    reward = [run.by_step(metrics.REWARD_MEAN, metrics.REWARD_MEAN_AFTER_KL) for run in runs]
    useful = [_column(run, "useful_tokens_per_s") for run in runs]
    length = [run.by_step(metrics.RESPONSE_LENGTH_MEAN) for run in runs]
    staleness = [run.by_step(metrics.STALENESS_MEAN, metrics.VERL_STALENESS_MEAN) for run in runs]
    if not any(value for points in staleness for _, value in points):
        staleness = []  # on-policy
    figures = (
        ("reward", charts.curve(reward, "mean reward", "training step"), words.REWARD),
        ("useful", charts.curve(useful, "useful tokens per second", low=0.0), words.USEFUL),
        ("length", charts.curve(length, "mean response length (tokens)", x="training step"), words.LENGTH),
        ("staleness", charts.curve(staleness, "mean staleness (versions)", "training step", low=0.0), words.STALENESS),
    )
    if shown := _pair(figures, runs):
        yield "<h2>Reward, speed and length</h2>" + shown


def comparison(runs: Sequence[Run]) -> Iterator[str]:
    if len(runs) != 2:
        return
    first, second = (matched.points(run.steps) for run in runs)
    bins = matched.match(first, second, FIRST_WARM_EPOCH)
    yield f"<h2>Speed at matched lengths</h2><p>{words.MATCHED}</p>"
    if not bins:
        yield f"<p><b>{words.UNMATCHED}</b></p>"
        return
    names = {"first": escape(runs[0].name), "second": escape(runs[1].name)}
    ratios = [b.ratio for b in bins]
    spread = {"ratio": matched.mean_ratio(bins), "low": min(ratios), "high": max(ratios), "bins": len(bins)}
    yield f"<p>{words.RATIO.format(**names, **spread)}</p>"
    rows = []
    for b in bins:
        speeds = [f"{b.first_speed:.0f}", f"{b.second_speed:.0f}", f"{b.ratio:.2f}"]
        rows.append(([f"{b.low:.0f} to {b.high:.0f}"], [str(b.first), str(b.second), *speeds]))
    head = [f"{what}, {run.name}" for what in ("steps", "tokens/s") for run in runs]
    yield _table(["mean length (tokens)"], [*head, "ratio"], rows)


def _column(run: Run, name: str) -> Points:
    return [(float(row["epoch"]), row[name]) for row in run.epochs if row[name] is not None]


def _pair(figures: Iterable[Figure], runs: Sequence[Run] = ()) -> str:
    """Return figures in two columns, below a legend if there are two runs; empty without figures."""
    shown = [_figure(name, picture, caption) for name, picture, caption in figures if picture]
    if not shown:
        return ""
    keys = (f'<span><i class="c-{c}"></i>{escape(run.name)}</span>' for c, run in zip("ab", runs, strict=False))
    legend = f'<div class="legend">{"".join(keys)}</div>' if len(runs) > 1 else ""
    return f'{legend}<div class="pair">{"".join(shown)}</div>'


def _figure(name: str, picture: str, caption: str, wide: bool = False) -> str:
    """Return a figure with its caption; wide figures (lanes) scroll on narrow screens and can be zoomed."""
    reset = '<button class="reset" hidden>reset zoom</button>' if wide else ""
    tools = f'<div class="tools">{reset}<button class="export" hidden>save as SVG</button></div>'
    body = f'<div class="wide">{picture}</div>' if wide else picture
    return f'<figure id="{name}">{body}{tools}<figcaption>{caption}</figcaption></figure>'


def _table(texts: Sequence[str], numbers: Sequence[str], rows: Sequence[tuple[Sequence[str], Sequence[str]]]) -> str:
    """Return a table of text columns, then number columns, with a rule above rows whose first cell is not empty."""

    def cells(tag: str, lead: Sequence[str], values: Sequence[str]) -> str:
        first = "".join(f'<{tag} class="text">{escape(text)}</{tag}>' for text in lead)
        return first + "".join(f"<{tag}>{escape(value)}</{tag}>" for value in values)

    groups = any(not lead[0] for lead, _ in rows)
    body = "".join(
        f"<tr{' class=first' if groups and lead[0] and at else ''}>{cells('td', lead, values)}</tr>"
        for at, (lead, values) in enumerate(rows)
    )
    head = f"<thead><tr>{cells('th', texts, numbers)}</tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _note(text: str) -> str:
    return f'<p class="about">{text}</p>'
