"""How well the longest responses to prompts never seen are found: length rankers beside an oracle.

    python -m benchmarks.ranker [--json] [--quick]

Two tasks, each with prompts to train on and others to be measured on (``benchmarks.length_pairs``): ``puzzles``, whose
lengths the tiny world's Qwen2 sampled, and ``roads``, whose lengths are those of the task's own writer of searches.
Arms: the ranker trained by each loss (``listwise``, ``margin``; ``regression`` is the published arm, StreamRL section
5), begun from the policy's weights where there is one, else from nothing; ``boosting``; ``prompt length``; ``history``,
which knows nothing of such prompts: all are alike to it, and what it finds is chance. The oracle knows each prompt's
mean over the very responses that are looked for, which flatters it a little. ``recall_N``: of the longest N% of
responses, the part that is among as many predicted longest; ``share_N``: of what the oracle recalls.

``forecasts``: the length predictor is told of each prompt what a ranker expects, and its forecast of the group is held
against what came.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import length_pairs
from benchmarks.machine import commit, describe
from verl_rhyme.lengths.boosting import Boosting
from verl_rhyme.lengths.pairs import Floats, Pairs
from verl_rhyme.lengths.predictor import LengthPredictor
from verl_rhyme.lengths.quality import Quality

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

#: Passes over the prompts; the best one is kept (``lengths/ranker.py``).
_EPOCHS = 6
_TOLD = ("share_20", "share_10", "share_5", "recall_20", "oracle_20", "rank_correlation", "seconds")


def tasks(quick: bool) -> Iterator[tuple[str, Pairs, Pairs, Path | None]]:
    """Name, prompts to train on, prompts to be measured on, and the model that a ranker begins with."""
    puzzles = [length_pairs.load(length_pairs.FOLDER / f"puzzles-{split}.parquet") for split in ("train", "test")]
    maps = [length_pairs.roads(*sizes) for sizes in ((512, 4, "train"), (256, 24, "test"))]
    for name, (train, test), model in (("puzzles", puzzles, length_pairs.MODEL), ("roads", maps, None)):
        yield name, train.take(range(96)) if quick else train, test.take(range(48)) if quick else test, model


def arms(train: Pairs, model: Path | None, quick: bool, seed: int) -> dict[str, Callable[[], Callable[..., Floats]]]:
    """By name, what trains one and gives what scores prompts."""
    from verl_rhyme.lengths import ranker

    def ranked(loss: str) -> Callable[[], Callable[..., Floats]]:
        def trained() -> Callable[..., Floats]:
            vocabulary = 1 + max(int(prompt.max()) for prompt in train.prompts)
            made = ranker.tiny(vocabulary, seed) if model is None else ranker.from_folder(model)
            rate = 1e-3 if model is None else 3e-4
            how = ranker.Training(loss=loss, seed=seed, rate=rate, epochs=1 if quick else _EPOCHS)
            return ranker.fit(made, train, how).expected

        return trained

    return {
        **{f"ranker, {loss}": ranked(loss) for loss in ranker.LOSSES},
        "boosting": lambda: Boosting.fit(train, seed).expected,
        "prompt length": lambda: lambda prompts: np.array([len(prompt) for prompt in prompts], dtype=np.float64),
        "history": lambda: lambda prompts: np.zeros(len(prompts)),
    }


def forecasts(test: Pairs, expected: Floats | None) -> dict[str, float]:
    """Of the predictor, group by group, told what a ranker expects or not: :meth:`Quality.take` of all."""
    predictor, quality = LengthPredictor(length_pairs.LIMIT), Quality()
    for prompt, lengths in enumerate(test.lengths):
        if expected is not None:
            predictor.rank(prompt, float(expected[prompt]))
        for tokens in lengths:
            predictor.ended(prompt, int(tokens))
        learnt = predictor.close(prompt)
        assert learnt is not None
        quality.add(learnt)
    return {name: round(value, 3) for name, value in quality.take().items()}


def rows(quick: bool, seed: int, only: str) -> Iterator[dict[str, Any]]:
    """A row an arm and task, of those whose name has ``only`` in it."""
    for task, train, test, model in tasks(quick):
        for arm, make in arms(train, model, quick, seed).items():
            if only not in f"{task}: {arm}":
                continue
            began = time.monotonic()
            score = make()
            seconds = time.monotonic() - began
            predicted = score(test.prompts)
            told = test.recalls(predicted)
            ranks = arm.startswith("ranker") or arm == "boosting"
            yield {
                "task": task,
                "arm": arm,
                "seed": seed,
                "trained_on": len(train),
                "measured_on": len(test),
                "seconds": round(seconds, 1),
                **{name: round(value, 3) for name, value in told.items()},
                "forecasts": forecasts(test, predicted if ranks else None),
            }


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="few prompts, one epoch")] = False,
    seeds: Annotated[int, typer.Option(help="how often each arm is trained")] = 1,
    only: Annotated[str, typer.Option(help="a part of 'TASK: ARM'")] = "",
) -> None:
    """Train every arm on one part of the prompts, and measure it on the other."""
    last = ""
    for seed in range(seeds):
        for row in rows(quick, seed, only):
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
