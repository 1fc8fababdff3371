"""``verl-rhyme ranker train|evaluate``: a length ranker from what a run left, and how good it is on other prompts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from verl_rhyme.lengths.boosting import Boosting
    from verl_rhyme.lengths.pairs import Pairs
    from verl_rhyme.lengths.ranker import LengthRanker

app = typer.Typer(help="Lengths of responses to prompts never seen: train a ranker, measure it.", no_args_is_help=True)

_Source = Annotated[Path, typer.Argument(help="A run whose log has responses, a history, or a checkpoint.")]
_Data = Annotated[list[Path] | None, typer.Option("--data", help="Of a history: the run's data files (parquet).")]
_Tokenizer = Annotated[Path | None, typer.Option(help="Of a history: the policy's folder.")]
_Column = Annotated[str, typer.Option(help="Column of --data that has the messages.")]
_Template = Annotated[
    str, typer.Option(help="Of a history: the run's data.apply_chat_template_kwargs, as JSON.", metavar="JSON")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def train(
    source: _Source,
    out: Annotated[Path, typer.Option(help="Where the ranker goes.")],
    data: _Data = None,
    tokenizer: _Tokenizer = None,
    column: _Column = "prompt",
    template: _Template = "{}",
    model: Annotated[
        Path | None, typer.Option(help="Language model to begin with, of the policy's vocabulary; default: a tiny one.")
    ] = None,
    boosting: Annotated[bool, typer.Option("--boosting", help="Gradient boosting over features; no model.")] = False,
    loss: Annotated[str, typer.Option(help="listwise, margin, or regression (as published).")] = "listwise",
    epochs: Annotated[int, typer.Option(help="Passes over the prompts, at most.")] = 12,
    batch: Annotated[int, typer.Option(help="Prompts that are compared with each other in a step.")] = 32,
    rate: Annotated[float, typer.Option(help="Learning rate; 1e-5 or so for a large model.")] = 1e-3,
    test: Annotated[float, typer.Option(help="Share of the prompts that are left for evaluate.")] = 0.2,
    seed: int = 0,
    as_json: _Json = False,
) -> None:
    """Train a ranker on the prompts of a run, and measure it on those that were left out."""
    try:
        if not 0 < test < 1:
            raise ValueError(f"--test {test}: a share of the prompts, above 0 and below 1")
        if model is not None and boosting:
            raise ValueError("--boosting has no model: drop one of both")
        pairs = _read(source, data, tokenizer, column, template)
        if len(pairs) < 16:
            raise ValueError(f"{source}: {len(pairs)} prompts; a ranker that can be measured needs 16 at least")
        known, left = pairs.split(test, seed)
        began = time.monotonic()
        ranker = _trained(known, model, boosting, (loss, epochs, batch, rate, seed))
        seconds = time.monotonic() - began
        ranker.save(out)
    except (OSError, ValueError) as error:
        _refuse("train", error)
    about = {"prompts": len(known), "seconds": round(seconds, 1), "out": str(out)}
    _print(left, ranker, about, as_json)


@app.command()
def evaluate(
    source: _Source,
    ranker: Annotated[Path, typer.Argument(help="What train wrote.")],
    data: _Data = None,
    tokenizer: _Tokenizer = None,
    column: _Column = "prompt",
    template: _Template = "{}",
    everything: Annotated[bool, typer.Option("--all", help="Also prompts that it was trained on.")] = False,
    as_json: _Json = False,
) -> None:
    """How well a ranker finds the longest responses to prompts that it was not trained on, beside an oracle."""
    try:
        loaded = _load(ranker)
        pairs = _read(source, data, tokenizer, column, template)
        left = pairs if everything else pairs.unseen(loaded.trained)
        if not len(left):
            raise ValueError(f"{source}: this ranker was trained on all of its {len(pairs)} prompts; --all takes them")
    except (OSError, ValueError) as error:
        _refuse("evaluate", error)
    _print(left, loaded, {}, as_json, everything)


def _read(source: Path, data: list[Path] | None, tokenizer: Path | None, column: str, template: str) -> Pairs:
    from verl_rhyme.commands import ranker_data

    try:
        options = json.loads(template)
    except ValueError as error:
        raise ValueError(f"--template {template}: no JSON ({error})") from error
    if not isinstance(options, dict):
        raise ValueError(f'--template {template}: no JSON object, such as {{"enable_thinking": false}}')
    return ranker_data.read(source, data or (), tokenizer, column, options)


def _trained(
    known: Pairs, model: Path | None, boosting: bool, how: tuple[str, int, int, float, int]
) -> LengthRanker | Boosting:
    if boosting:
        from verl_rhyme.lengths.boosting import Boosting

        return Boosting.fit(known, how[-1])
    from rich.progress import Progress
    from transformers.utils import logging

    from verl_rhyme.lengths import ranker as rankers

    logging.disable_progress_bar()  # of files that are read and written in a moment

    loss, epochs, batch, rate, seed = how
    training = rankers.Training(loss=loss, epochs=epochs, batch=batch, rate=rate, seed=seed)
    made = rankers.tiny_for(known, seed) if model is None else rankers.from_folder(model)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("epochs", total=epochs)

        def told(epoch: dict[str, float]) -> bool:
            progress.update(task, advance=1, description=f"rank correlation {epoch['rank_correlation']:.3f}")
            return False

        return rankers.fit(made, known, training, told)


def _load(folder: Path) -> LengthRanker | Boosting:
    from verl_rhyme.lengths import boosting

    if (folder / boosting.FILE).is_file():
        return boosting.Boosting.load(folder)
    from transformers.utils import logging

    from verl_rhyme.lengths import ranker

    logging.disable_progress_bar()
    return ranker.load(folder)


def _print(
    left: Pairs, ranker: LengthRanker | Boosting, about: dict[str, Any], as_json: bool, everything: bool = False
) -> None:
    found = left.recalls(ranker.expected(left.prompts))
    if as_json:
        print(json.dumps({**about, "measured_on": len(left), **found}))
        return
    table = Table("longest", "found", "by an oracle", "of that", box=None, pad_edge=False)
    for tail in (20, 10, 5):
        cells = (f"{found[f'{name}_{tail}']:.0%}" for name in ("recall", "oracle", "share"))
        table.add_row(f"{tail}% of responses", *cells)
    Console().print(table, highlight=False)
    which = "prompts" if everything else "prompts that it was not trained on"
    print(f"{len(left)} {which}; rank correlation with their mean lengths {found['rank_correlation']:.2f}")
    if "seconds" in about:
        print(f"trained on {about['prompts']} prompts in {about['seconds']} s: {about['out']}")


def _refuse(command: str, error: Exception) -> None:
    print(f"verl-rhyme ranker {command}: {error}", file=sys.stderr)
    raise typer.Exit(1) from error
