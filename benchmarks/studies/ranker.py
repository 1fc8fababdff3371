"""How well the longest responses to prompts never seen are found: length rankers beside an oracle.

    python -m benchmarks.studies.ranker [--json] [--quick] [--development] [--seeds 3] [--only TEXT]

Two tasks, each with prompts to train on and others to be measured on (``benchmarks.studies.length_pairs``):
``puzzles``, whose lengths the tiny world's Qwen2 sampled, and ``roads``, whose lengths are those of the task's own
writer of searches. ``--development``: measured on the prompts that were looked at while rankers were made, and not on
fresh ones.

Arms: the ranker trained by each loss (``listwise``, ``margin``; ``regression`` is the published arm, StreamRL section
5), begun from the policy's weights where there is one, else from nothing; ``boosting``; ``prompt length``; ``history``,
which knows nothing of such prompts: all are alike to it, and what it finds is chance. Of road maps, to show what a
prompt says from what a ranker reads in it: ``boosting, map read``, the same trees on what one sees who reads the map
(``length_pairs.seen_in_a_map``), and ``searches``, the mean of 32 searches tried out on it. The oracle knows each
prompt's mean over the very responses that are looked for, which flatters it a little. ``recall_N``: of the longest N%
of responses, the part among as many predicted longest; ``share_N``: of what the oracle recalls.

``forecasts``: the length predictor gets a ranker's expectation of each prompt, and its forecast of the group is
compared with the real lengths.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.machine import commit, describe
from benchmarks.studies import length_pairs
from verl_rhyme.lengths import boosting
from verl_rhyme.lengths.boosting import Boosting
from verl_rhyme.lengths.pairs import Floats, Pairs
from verl_rhyme.lengths.predictor import LengthPredictor
from verl_rhyme.lengths.quality import Quality

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

#: Passes over the prompts; the best one is kept (``lengths/ranker.py``).
_EPOCHS = 6
_SEARCHES = 32
_TOLD = ("share_20", "share_10", "share_5", "recall_20", "oracle_20", "rank_correlation", "seconds")

#: Trains an arm, and scores the prompts that it is measured on.
Arm = Callable[[], Callable[[], Floats]]


class Task(NamedTuple):
    """Prompts to train on and to be measured on, the model that a ranker begins with, and arms of the task's own."""

    train: Pairs
    test: Pairs
    model: Path | None
    own: dict[str, Arm]


@cache
def puzzles(quick: bool, fresh: bool) -> Task:
    test = "fresh" if fresh else "test"
    known, new = (length_pairs.load(length_pairs.FOLDER / f"puzzles-{split}.parquet") for split in ("train", test))
    if quick:
        known, new = known.select(range(96)), new.select(range(48))
    return Task(known, new, length_pairs.MODEL, {})


@cache
def roads(quick: bool, fresh: bool) -> Task:
    from examples.roads import maps

    sizes = (96, 48) if quick else (512, 256)
    train, seen = length_pairs.roads(sizes[0], 4, "train")
    test, tasks = length_pairs.roads(sizes[1], 24, "fresh" if fresh else "test")

    def read() -> Callable[[], Floats]:
        known, new = (np.array([length_pairs.seen_in_a_map(task) for task in of]) for of in (seen, tasks))
        mean = train.locations.mean()
        grown = boosting.grown(known, train.locations - mean, None, 0)
        return lambda: mean + np.asarray(grown.predict(new))

    def searched() -> Floats:
        rng = random.Random("searches")
        return np.array([np.mean([len(maps.search(t, rng).split()) for _ in range(_SEARCHES)]) for t in tasks])

    return Task(train, test, None, {"boosting, map read": read, "searches": lambda: searched})


TASKS = {"puzzles": puzzles, "roads": roads}


def arms(task: Task, quick: bool, seed: int) -> dict[str, Arm]:
    """By name."""

    def ranked(loss: str) -> Arm:
        def trained() -> Callable[[], Floats]:
            from verl_rhyme.lengths import ranker

            made = ranker.tiny_for(task.train, seed) if task.model is None else ranker.from_folder(task.model)
            rate = 1e-3 if task.model is None else 3e-4
            fitted = ranker.fit(made, task.train, loss=loss, seed=seed, rate=rate, epochs=1 if quick else _EPOCHS)
            return lambda: fitted.expected(task.test.prompts)

        return trained

    def boosted() -> Callable[[], Floats]:
        fitted = Boosting.fit(task.train, seed)
        return lambda: fitted.expected(task.test.prompts)

    return {
        **{f"ranker, {loss}": ranked(loss) for loss in ("listwise", "margin", "regression")},
        "boosting": boosted,
        **task.own,
        "prompt length": lambda: lambda: np.array([len(prompt) for prompt in task.test.prompts], dtype=np.float64),
        "history": lambda: lambda: np.zeros(len(task.test)),
    }


def forecasts(test: Pairs, expected: Floats | None) -> dict[str, float]:
    """Return :meth:`Quality.pop_metrics` of the predictor, group by group, with or without a ranker's expectations."""
    predictor, quality = LengthPredictor(length_pairs.LIMIT), Quality()
    for number, lengths in enumerate(test.lengths):
        prompt, tokens = str(number), [int(each) for each in lengths]
        if expected is not None:
            predictor.rank(prompt, float(expected[number]))
        forecast = float(predictor.forecast([prompt]).expected[0])
        quality.add(forecast, tokens, predictor.knows(prompt), predictor.ranked(prompt))
        predictor.learn(prompt, tokens)
    return {name: round(value, 3) for name, value in quality.pop_metrics().items()}


def rows(quick: bool, seed: int, only: str, fresh: bool = True) -> Iterator[dict[str, Any]]:
    """A row an arm and task, of those whose name has ``only`` in it."""
    for name, made in TASKS.items():
        if any(only.startswith(other) for other in TASKS if other != name):
            continue  # making it takes seconds
        task = made(quick, fresh)
        for arm, train in arms(task, quick, seed).items():
            if only not in f"{name}: {arm}":
                continue
            began = time.monotonic()
            score = train()
            seconds = time.monotonic() - began
            predicted = score()
            ranks = arm.startswith(("ranker", "boosting"))
            yield {
                "task": name,
                "arm": arm,
                "seed": seed,
                "fresh": fresh,
                "trained_on": len(task.train),
                "measured_on": len(task.test),
                "seconds": round(seconds, 1),
                **{figure: round(value, 3) for figure, value in task.test.evaluate(predicted).items()},
                "forecasts": forecasts(task.test, predicted if ranks else None),
            }


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="few prompts, one epoch")] = False,
    development: Annotated[bool, typer.Option("--development", help="prompts that were looked at before")] = False,
    seeds: Annotated[int, typer.Option(help="how often each arm is trained")] = 1,
    only: Annotated[str, typer.Option(help="a part of 'TASK: ARM'")] = "",
) -> None:
    """Train every arm on one part of the prompts, and measure it on the other."""
    last = ""
    for seed in range(seeds):
        for row in rows(quick, seed, only, not development):
            if as_json:
                row = {"benchmark": "ranker", **row, "quick": quick}
                print(json.dumps({**row, "machine": describe(), "commit": commit()}), flush=True)
                continue
            if row["task"] != last:
                last = row["task"]
                print(f"\n{last}: {row['trained_on']} prompts to train on, {row['measured_on']} others")
                print(f"{'':20}" + "".join(f"{name:>18}" for name in _TOLD))
            print(f"{row['arm']:20}" + "".join(f"{row[name]:18.3f}" for name in _TOLD), flush=True)


if __name__ == "__main__":
    app()
