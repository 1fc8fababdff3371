"""``verl-rhyme ranker train|evaluate``: train a length ranker on the responses of a run, and evaluate it."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from verl_rhyme.commands.output import one_line_errors

if TYPE_CHECKING:
    from verl_rhyme.lengths.pairs import Pairs
    from verl_rhyme.lengths.ranker import LengthRanker

app = typer.Typer(help="Train and evaluate a ranker of response lengths for unseen prompts.", no_args_is_help=True)

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder with logged responses (events.responses=true).")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def train(
    run: _Run,
    out: Annotated[Path, typer.Option(help="Folder for the ranker.")],
    model: Annotated[
        Path | None, typer.Option(help="Initial language model with the policy's vocabulary; default: a tiny model.")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Most passes over the prompts.")] = 12,
    rate: Annotated[float, typer.Option(help="Learning rate; about 1e-5 for a large model.")] = 1e-3,
    test: Annotated[float, typer.Option(help="Share of the prompts held out for evaluation.")] = 0.2,
    seed: int = 0,
    as_json: _Json = False,
) -> None:
    """Train a ranker on the prompts of a run and evaluate it on held-out prompts."""
    rankers = _rankers()
    with one_line_errors("verl-rhyme ranker train"):
        if not 0 < test < 1:
            raise ValueError(f"--test {test}: must be a share of the prompts, above 0 and below 1")
        pairs = read(run)
        if len(pairs) < 16:
            raise ValueError(f"{run}: {len(pairs)} prompts; training and evaluation need at least 16")
        known, held_out = pairs.split(test)
        began = time.monotonic()
        initial = rankers.tiny_for(known, seed) if model is None else rankers.from_folder(model)
        ranker = rankers.fit(initial, known, rate=rate, epochs=epochs, seed=seed, report=_report)
        seconds = round(time.monotonic() - began, 1)
        ranker.save(out)
    _print(held_out, ranker, as_json, {"prompts": len(known), "seconds": seconds, "out": str(out)})
    if not as_json:
        print(f"trained on {len(known)} prompts in {seconds} s: {out}")


@app.command()
def evaluate(
    run: _Run,
    ranker: Annotated[Path, typer.Argument(help="Folder written by train.")],
    as_json: _Json = False,
) -> None:
    """Evaluate how well a ranker finds the longest responses to prompts it was not trained on, next to an oracle."""
    with one_line_errors("verl-rhyme ranker evaluate"):
        loaded, pairs = _rankers().load(ranker), read(run)
        unseen = pairs.excluding(loaded.trained)
        if not len(unseen):
            raise ValueError(f"{run}: the ranker was trained on all {len(pairs)} prompts")
    _print(unseen, loaded, as_json, {})


def read(run: Path) -> Pairs:
    """Read the prompts of a run whose event log has responses, and the lengths of these; ValueError without any."""
    from verl_rhyme.lengths.pairs import Pairs
    from verl_rhyme.observability import events

    folders = [run, *sorted(run.glob("events")), *sorted(run.glob("*/events"))]
    folder = next((path for path in folders if any(path.glob("responses-*.arrow"))), None)
    if folder is None:
        raise ValueError(
            f"{run} has no logged responses: train with actor_rollout_ref.rollout.custom.rhyme.events.responses=true"
        )
    with warnings.catch_warnings(record=True):  # of files that a killed run left
        warnings.simplefilter("always")
        table = events.read_responses(folder).combine_chunks()
    if not len(table):
        raise ValueError(f"{folder}: no readable response in the event log")
    first: dict[bytes, int] = {}  # row, by prompt
    lengths: dict[bytes, list[int]] = {}
    sizes = table["tokens"].combine_chunks().value_lengths().to_pylist()
    for row, (key, size) in enumerate(zip(table["prompt_key"].to_pylist(), sizes, strict=True)):
        first.setdefault(key, row)
        lengths.setdefault(key, []).append(size)
    prompts = table["prompt"].take(list(first.values())).to_pylist()
    return Pairs.from_rows(zip(prompts, lengths.values(), strict=True))


def _rankers() -> ModuleType:
    """Import the rankers, which takes seconds."""
    from transformers.utils import logging

    from verl_rhyme.lengths import ranker

    logging.disable_progress_bar()  # transformers', for reading and writing files
    return ranker


def _report(rank_correlation: float) -> None:
    print(f"held-out rank correlation {rank_correlation:.3f}", file=sys.stderr)


def _print(unseen: Pairs, ranker: LengthRanker, as_json: bool, training: dict[str, Any]) -> None:
    measures = unseen.evaluate(ranker.expected(unseen.prompts))
    if as_json:
        print(json.dumps({**training, "measured_on": len(unseen), **measures}))
        return
    table = Table("longest", "found", "by an oracle", "ratio", box=None, pad_edge=False)
    for tail in (20, 10, 5):
        cells = (f"{measures[f'{name}_{tail}']:.0%}" for name in ("recall", "oracle", "share"))
        table.add_row(f"{tail}% of responses", *cells)
    Console().print(table, highlight=False)
    correlation = measures["rank_correlation"]
    print(f"{len(unseen)} unseen prompts; rank correlation with their mean lengths {correlation:.2f}")
