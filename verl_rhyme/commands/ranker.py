"""``verl-rhyme ranker train|evaluate``: train a length ranker on the data of a run, and evaluate it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from verl_rhyme.commands.output import one_line_errors

if TYPE_CHECKING:
    from verl_rhyme.lengths.pairs import Pairs
    from verl_rhyme.lengths.ranker import LengthRanker

app = typer.Typer(help="Train and evaluate a ranker of response lengths for unseen prompts.", no_args_is_help=True)

_Source = Annotated[Path, typer.Argument(help="Run folder with logged responses, history, or checkpoint.")]
_Data = Annotated[list[Path] | None, typer.Option("--data", help="For a history: data files of the run (parquet).")]
_Tokenizer = Annotated[Path | None, typer.Option(help="For a history: folder of the policy.")]
_Column = Annotated[str, typer.Option(help="Column of --data with the messages.")]
_Template = Annotated[
    str, typer.Option(help="For a history: the run's data.apply_chat_template_kwargs, as JSON.", metavar="JSON")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def train(
    source: _Source,
    out: Annotated[Path, typer.Option(help="Folder for the ranker.")],
    data: _Data = None,
    tokenizer: _Tokenizer = None,
    column: _Column = "prompt",
    template: _Template = "{}",
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
    with one_line_errors("verl-rhyme ranker train"):
        if not 0 < test < 1:
            raise ValueError(f"--test {test}: must be a share of the prompts, above 0 and below 1")
        pairs = _read(source, data, tokenizer, column, template)
        if len(pairs) < 16:
            raise ValueError(f"{source}: {len(pairs)} prompts; training and evaluation need at least 16")
        known, held_out = pairs.split(test)
        began = time.monotonic()
        ranker = _trained(known, model, rate, epochs, seed)
        seconds = time.monotonic() - began
        ranker.save(out)
    training = {"prompts": len(known), "seconds": round(seconds, 1), "out": str(out)}
    _print(held_out, ranker, training, as_json)


@app.command()
def evaluate(
    source: _Source,
    ranker: Annotated[Path, typer.Argument(help="Folder written by train.")],
    data: _Data = None,
    tokenizer: _Tokenizer = None,
    column: _Column = "prompt",
    template: _Template = "{}",
    everything: Annotated[bool, typer.Option("--all", help="Include prompts of its training.")] = False,
    as_json: _Json = False,
) -> None:
    """Evaluate how well a ranker finds the longest responses to unseen prompts, compared with an oracle."""
    with one_line_errors("verl-rhyme ranker evaluate"):
        loaded = _load(ranker)
        pairs = _read(source, data, tokenizer, column, template)
        unseen = pairs if everything else pairs.excluding(loaded.trained)
        if not len(unseen):
            raise ValueError(f"{source}: the ranker was trained on all {len(pairs)} prompts; use --all to include them")
    _print(unseen, loaded, {}, as_json, everything)


def _read(source: Path, data: list[Path] | None, tokenizer: Path | None, column: str, template: str) -> Pairs:
    from verl_rhyme.commands import ranker_data

    try:
        options = json.loads(template)
    except ValueError as error:
        raise ValueError(f"--template {template}: not JSON ({error})") from error
    if not isinstance(options, dict):
        raise ValueError(f'--template {template}: not a JSON object such as {{"enable_thinking": false}}')
    return ranker_data.read(source, data or (), tokenizer, column, options)


def _trained(known: Pairs, model: Path | None, rate: float, epochs: int, seed: int) -> LengthRanker:
    from rich.progress import Progress
    from transformers.utils import logging

    from verl_rhyme.lengths import ranker as rankers

    logging.disable_progress_bar()  # transformers', for reading and writing files

    initial = rankers.tiny_for(known, seed) if model is None else rankers.from_folder(model)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("epochs", total=epochs)

        def report(rank_correlation: float) -> None:
            progress.update(task, advance=1, description=f"rank correlation {rank_correlation:.3f}")

        return rankers.fit(initial, known, rate=rate, epochs=epochs, seed=seed, report=report)


def _load(folder: Path) -> LengthRanker:
    from transformers.utils import logging

    from verl_rhyme.lengths import ranker

    logging.disable_progress_bar()
    return ranker.load(folder)


def _print(
    tested: Pairs, ranker: LengthRanker, training: dict[str, Any], as_json: bool, everything: bool = False
) -> None:
    measures = tested.evaluate(ranker.expected(tested.prompts))
    if as_json:
        print(json.dumps({**training, "measured_on": len(tested), **measures}))
        return
    table = Table("longest", "found", "by an oracle", "ratio", box=None, pad_edge=False)
    for tail in (20, 10, 5):
        cells = (f"{measures[f'{name}_{tail}']:.0%}" for name in ("recall", "oracle", "share"))
        table.add_row(f"{tail}% of responses", *cells)
    Console().print(table, highlight=False)
    which = "prompts" if everything else "unseen prompts"
    print(f"{len(tested)} {which}; rank correlation with their mean lengths {measures['rank_correlation']:.2f}")
    if "seconds" in training:
        print(f"trained on {training['prompts']} prompts in {training['seconds']} s: {training['out']}")
