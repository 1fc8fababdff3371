"""Aims and table of the rows of :mod:`benchmarks.full_scale`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: Figures of a run with its arm and setting.
Row = dict[str, Any]


def aims(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield the aims of one model and whether the mean tokens per second over the seeds meet them."""
    found = _means(rows)
    for (gpus, separate, drafts), arms in found.items():
        where = {"gpus": gpus, "separate": separate, "drafts": drafts}
        for (name, k), row in arms.items():
            others = {
                other: each["tokens_per_s"] for (other, bound), each in arms.items() if bound == k and other != "full"
            }
            if name != "full" or not others:
                continue
            best = max(others, key=lambda other: others[other])
            value = row["tokens_per_s"] / others[best]
            yield _aim(f"full, k={k}, over the best other of this bound", value, 0.97, best=best, **where)
        if (gpus, separate, drafts) == (1024, True, True):
            stream, dial, four = (arms.get(each) for each in (("stream", 1), ("full", 2), ("full", 4)))
            if stream and dial:
                staleness = {"staleness": [dial["staleness_mean"], stream["staleness_mean"]]}
                value = dial["tokens_per_s"] / stream["tokens_per_s"]
                yield _aim("full, k=2, over stream, k=1, at equal mean staleness", value, 1.2, **where, **staleness)
            if four:
                value = four["tokens_per_s"] / four["bound_tokens_per_s"]
                yield _aim("full, k=4, over the bound where nobody waits", value, 0.85, **where)


def _aim(aim: str, value: float, least: float, **about: Any) -> Row:
    return {"aim": aim, "value": round(value, 3), "least": least, "holds": round(value, 3) >= least, **about}


#: Means of an arm's rows over its seeds, by GPUs, topology and drafts, then by name and staleness bound.
_Means = dict[tuple[int, bool, bool], dict[tuple[str, int], dict[str, float]]]


def _means(rows: Iterable[Row]) -> _Means:
    groups: dict[tuple[int, bool, bool], dict[tuple[str, int], list[Row]]] = {}
    for row in rows:
        arms = groups.setdefault((row["gpus"], row["separate"], row["drafts"]), {})
        arms.setdefault((row["arm"], row["max_staleness"]), []).append(row)
    means: _Means = {}
    for key, arms in groups.items():
        means[key] = {
            arm: {
                name: statistics.mean(row[name] for row in own)
                for name in own[0]
                if all(isinstance(row[name], int | float) for row in own)
            }
            for arm, own in arms.items()
        }
    return means


def table(rows: Iterable[Row]) -> str:
    """Return a Markdown table of one model's arms by GPUs and drafts; figures are means over the seeds."""
    means, lines = _means(rows), list[str]()
    for gpus, drafts in sorted({(gpus, drafts) for gpus, _, drafts in means}, key=lambda each: (-each[0], each[1])):
        base = means[gpus, False, drafts]["verl, sync", 0]["tokens_per_s"]
        title = f"{gpus:,} GPUs, {'drafts' if drafts else 'no drafts'}"
        names = "k", "GPUs that roll out", "s a step", "thousand tokens/s", "over `verl, sync`", "staleness, mean; most"
        lines += [f"| {' | '.join((title, *names, 'wasted', 'bound, longest, rest, s'))} |", "|---" * 9 + "|"]
        for separate in (False, True):
            for (name, k), row in means.get((gpus, separate, drafts), {}).items():
                speed, bold = row["tokens_per_s"], "**" * (name == "full")
                cells = [f"{bold}`{name}`{bold}", f"{k}", f"{row['rollout_gpus']:.0f}" if separate else "all"]
                cells += [f"{row['step_s']:.0f}", f"{speed / 1000:.0f}", f"{speed / base:.2f}"]
                cells += [f"{row['staleness_mean']:.1f}; {row['staleness_max']:.0f}", f"{row['wasted']:.0%}"]
                cells.append(_decomposed(row) if separate else f"{row['bound_s']:.0f}")
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _decomposed(row: Mapping[str, float]) -> str:
    """Return the step time in parts: the bound, then what the split, the longest response and the rest add."""
    splits = [row["bound_s"], row["split_s"], row["longest_s"], row["step_s"]]
    first, *more = [splits[0], *(b - a for a, b in itertools.pairwise(splits))]
    return f"{first:.0f} " + " ".join(f"{each:+.0f}" for each in more)
