"""Forecasts of lengths on recorded traces, and on lengths made up at the size of a real dataset.

    python -m benchmarks.studies.lengths [--json] [--quick] [TRACE.parquet ...]

Each group is forecast before any of its responses has begun, then learnt. Arms: ``ours``
(``verl_rhyme.lengths.predictor``); ``last epoch``, the mean of the prompt's responses in the epoch before; ``all
epochs``, of all before; ``siblings' mean``, what nobody can know: the mean of the group's other responses in the same
epoch. ``ours, half a group on`` forecasts those that still run once half of their group has ended, side by side.

Recall of a tail: of the longest 5, 10, 20% of a step's responses, the part that is among as many predicted longest.
Coverage of a quantile is the share of responses that were no longer than it; 0.1, 0.5, 0.9 are right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import traces
from benchmarks.machine import commit, describe
from verl_rhyme.lengths.predictor import LengthPredictor
from verl_rhyme.lengths.quality import Quality, measures

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

#: An epoch's groups: prompt and the lengths of its responses, step by step.
Epoch = list[list[tuple[int, np.ndarray]]]
_TOLD = ("rank_correlation", "recall_5", "recall_10", "recall_20")


def recorded(path: Path) -> tuple[int, list[Epoch]]:
    """The limit and the epochs of a trace."""
    epochs: dict[int, Epoch] = {}
    names: dict[bytes, int] = {}
    for step in traces.load(path):
        groups: dict[int, list[int]] = {}
        for response in step:
            groups.setdefault(names.setdefault(response.key, len(names)), []).append(len(response.tokens))
        epochs.setdefault(step[0].epoch, []).append([(key, np.array(lengths)) for key, lengths in groups.items()])
    longest = max(int(lengths.max()) for steps in epochs.values() for step in steps for _, lengths in step)
    return longest, [epochs[e] for e in sorted(epochs)]


def made_up(between: float, within: float, prompts: int, epochs: int, seed: int = 0) -> tuple[int, list[Epoch]]:
    """Prompts whose median lengths are spread by ``between``, their responses by ``within`` (deviations of the log
    length; heavy-tailed), up to 20,480 tokens; all grow by 3% an epoch, and each prompt wanders by 10%."""
    rng = np.random.default_rng(seed)
    location = rng.normal(np.log(2500), between, prompts)
    made: list[Epoch] = []
    for _ in range(epochs):
        noise = within * rng.standard_t(5, (prompts, 16)) / np.sqrt(5 / 3)
        lengths = np.clip(np.exp(location[:, None] + noise), 1, 20480).astype(np.int64)
        order = rng.permutation(prompts)
        made.append([[(int(p), lengths[p]) for p in order[at : at + 512]] for at in range(0, prompts, 512)])
        location = location + 0.03 + 0.1 * rng.standard_normal(prompts)
    return 20480, made


def evaluate(limit: int, epochs: list[Epoch]) -> Iterator[dict[str, Any]]:
    """Figures by epoch and arm: means over its steps."""
    predictor = LengthPredictor(limit)
    past: dict[int, list[np.ndarray]] = {}
    for number, steps in enumerate(epochs):
        found: dict[str, list[dict[str, float]]] = {}
        for step in steps:
            lengths = np.concatenate([group for _, group in step]).astype(np.float64)
            everything = np.concatenate([np.concatenate(groups) for groups in past.values()]) if past else np.ones(1)
            typical = float(everything.mean())
            quality = Quality()
            found.setdefault("ours, half a group on", []).append(_half_on(predictor, step))
            for key, group in step:
                for tokens in group:
                    predictor.ended(key, int(tokens), complete=tokens < limit)
                learnt = predictor.close(key)
                assert learnt is not None, "a group of no responses"
                quality.add(learnt)
            found.setdefault("ours", []).append(quality.take())
            baselines = {
                "last epoch": [past[key][-1].mean() if key in past else typical for key, _ in step],
                "all epochs": [np.concatenate(past[key]).mean() if key in past else typical for key, _ in step],
            }
            for arm, means in baselines.items():
                sizes = [len(group) for _, group in step]
                found.setdefault(arm, []).append(measures(np.repeat(np.array(means, dtype=np.float64), sizes), lengths))
            others = [(group.sum() - group) / max(len(group) - 1, 1) for _, group in step]
            found.setdefault("siblings' mean", []).append(measures(np.concatenate(others), lengths))
        for step in steps:
            for key, group in step:
                past.setdefault(key, []).append(group)
        for arm, figures in found.items():
            names = dict.fromkeys(name for figure in figures for name in figure)
            means = {n: round(float(np.mean([f[n] for f in figures if n in f])), 3) for n in names}
            spread = round(float(np.std([f["rank_correlation"] for f in figures if f])), 3)
            yield {"epoch": number, "arm": arm, **means, "rank_correlation_deviation": spread, "steps": len(steps)}


def _half_on(predictor: LengthPredictor, step: list[tuple[int, np.ndarray]]) -> dict[str, float]:
    """Of the half of each group that is still running when the other half has ended; changes nothing."""
    names, emitted, wanted = [], [], []
    kept = predictor.state_dict()
    for key, group in step:
        now = int(np.median(group))
        for tokens in group:
            if tokens <= now:
                predictor.ended(key, int(tokens))
            else:
                names.append(key)
                emitted.append(now)
                wanted.append(float(tokens))
    if not names:
        return {}
    forecast, lengths = predictor.forecast(names, np.array(emitted)), np.array(wanted)
    figures = measures(forecast.quantile(0.5), lengths)
    for share in (0.1, 0.5, 0.9):
        figures[f"coverage_{round(100 * share)}"] = float((lengths <= forecast.quantile(share)).mean())
    predictor.load_state_dict(kept)
    return figures


@app.command()
def main(
    files: Annotated[list[Path] | None, typer.Argument(help="default: all in benchmarks/traces")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="one trace, few prompts")] = False,
) -> None:
    """Forecast every group of every workload before it begins."""
    paths = files or sorted(traces.FOLDER.glob("*.parquet"))
    workloads: dict[str, tuple[int, list[Epoch]]] = {
        path.stem: recorded(path) for path in paths[: 1 if quick else None]
    }
    prompts = 1024 if quick else 17398
    for between, within in ((0.8, 0.3), (0.5, 0.5)):
        workloads[f"made up, between {between}, within {within}"] = made_up(between, within, prompts, 3)
    for name, (limit, epochs) in workloads.items():
        if not as_json:
            print(f"\n{name}\n{'epoch':>5} {'arm':24}" + "".join(f"{told:>18}" for told in _TOLD) + "  coverage")
        for row in evaluate(limit, epochs):
            if as_json:
                row = {"benchmark": "lengths", "workload": name, **row}
                print(json.dumps({**row, "machine": describe(), "commit": commit()}), flush=True)
                continue
            coverage = [f"{row[f'coverage_{q}']:.2f}" for q in (10, 50, 90) if f"coverage_{q}" in row]
            told = "".join(f"{row.get(told, float('nan')):18.3f}" for told in _TOLD)
            print(f"{row['epoch']:5} {row['arm']:24}{told}  {' '.join(coverage)}", flush=True)


if __name__ == "__main__":
    app()
