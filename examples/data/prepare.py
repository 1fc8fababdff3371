"""Prepare real data sets in verl's parquet schema.

    python -m examples.data.prepare dapo|aime|amc|math500|minerva|olympiad|gsm8k --out DIR [--source PATH]
    python -m examples.data.prepare kk --out DIR [--puzzles 5000] [--seed 0]
    python -m examples.data.prepare eval --out DIR [--samples 32]

Without ``--source`` a data set comes from the Hugging Face hub. All files have one schema, so verl can combine them
(``data.val_files=[...]``).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from examples.tiny_world import puzzles as knights

Row = dict[str, Any]
#: Question, answer, id and level of a row.
Converted = tuple[str, Any, str, int]

#: ``id`` is the row's name in the source; ``level`` its difficulty there (MATH's level 1 to 5, or people of a puzzle),
#: or 0 if the source has none.
SCHEMA = pa.schema(
    {
        "data_source": pa.string(),
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct({"split": pa.string(), "index": pa.int64(), "id": pa.string(), "level": pa.int64()}),
    }
)

#: Files of ``eval``: file name, the command that makes it, and whether it has so few problems that each gets many
#: samples.
EVALUATION = {
    "aime-2024": ("aime", True),
    "amc-2023": ("amc", True),
    "math-500": ("math500", False),
    "minerva": ("minerva", False),
    "olympiad-bench": ("olympiad", False),
    "gsm8k-test": ("gsm8k", False),
}
#: Column with a row's number of samples; verl's V1 trainer prefers it to ``rollout.n`` and ``val_kwargs.n``.
SAMPLES = "__rollout_n__"

BATCH = 10_000
HELD_OUT = 0.1
PEOPLE = (3, 4, 5, 6, 7)

# The instructions of verl's examples, for comparable results.
BOXED = "Let's think step by step and output the final answer within \\boxed{}."
HASHES = 'Let\'s think step by step and output the final answer after "####".'
KK_PROMPT = (
    "On an island live only knights, who always tell the truth, and knaves, who always lie. "
    "You meet {count} of its people: {names}.\n{said}\nWho is a knight, and who is a knave?\n\n"
    "Think about it first, within <think> and </think>. Then state everybody's role within <answer> and </answer>, "
    "like this:\n<think> your reasoning </think> <answer> NAME is a knight, NAME is a knave, ... </answer>"
)

app = typer.Typer(help="Prepare real data sets in verl's parquet schema.", no_args_is_help=True, add_completion=False)
Out = Annotated[Path, typer.Option(help="Output folder; created if missing.", file_okay=False)]
Source = Annotated[
    Path | None,
    typer.Option(help="Parquet, json or jsonl file of the data set, or its folder of `hf download`. Default: the hub."),
]


class DataError(Exception):
    """Data preparation failed; the message says what is wrong, where, and the remedy."""


@app.command()
def dapo(out: Out, source: Source = None) -> None:
    """DAPO-Math-17k without duplicates: dapo-math-17k.parquet."""
    _prepare_verl("BytedTsinghua-SIA/DAPO-Math-17k", source, out / "dapo-math-17k.parquet", "train")


@app.command()
def aime(out: Out, source: Source = None) -> None:
    """AIME 2024 without duplicates: aime-2024.parquet."""
    _prepare_verl("BytedTsinghua-SIA/AIME-2024", source, out / "aime-2024.parquet", "test")


@app.command()
def math500(out: Out, source: Source = None) -> None:
    """MATH-500: math-500.parquet."""

    def convert(row: Row, index: int) -> Converted:
        level = re.search(r"\d+", str(row["level"]))
        return row["problem"], row["answer"], row["unique_id"], int(level[0]) if level else 0

    columns = ("problem", "answer", "level", "unique_id")
    _prepare(out / "math-500.parquet", "HuggingFaceH4/MATH-500", "test", columns, convert, source)


@app.command()
def amc(out: Out, source: Source = None) -> None:
    """AMC 2023: amc-2023.parquet."""
    _prepare(out / "amc-2023.parquet", "math-ai/amc23", "test", ("question", "answer"), _answered, source)


@app.command()
def minerva(out: Out, source: Source = None) -> None:
    """Minerva's OCW courses, university-level problems: minerva.parquet."""
    _prepare(out / "minerva.parquet", "math-ai/minervamath", "test", ("question", "answer"), _answered, source)


@app.command()
def olympiad(out: Out, source: Source = None) -> None:
    """OlympiadBench's English mathematics problems without pictures and with an answer: olympiad-bench.parquet."""

    def convert(row: Row, index: int) -> Converted:
        if not row["final_answer"]:
            raise ValueError(f"'final_answer' is {row['final_answer']!r}")
        return row["question"], ", ".join(row["final_answer"]), row["id"], 0  # several parts form one answer

    name, config, columns = "Hothan/OlympiadBench", "OE_TO_maths_en_COMP", ("question", "final_answer", "id")
    _prepare(out / "olympiad-bench.parquet", name, "train", columns, convert, source, config, as_split="test")


@app.command()
def gsm8k(out: Out, source: Source = None) -> None:
    """GSM8K: gsm8k-train.parquet and gsm8k-test.parquet. A source is a folder."""

    def convert(row: Row, index: int) -> Converted:
        _, hashes, answer = row["answer"].rpartition("####")
        if not hashes:
            raise ValueError(f"'answer' does not end in '#### 42': {row['answer'][:60]!r}")
        return row["question"], answer.strip().replace(",", ""), f"{split}/{index}", 0

    for split in ("train", "test"):
        path, columns = out / f"gsm8k-{split}.parquet", ("question", "answer")
        _prepare(path, "openai/gsm8k", split, columns, convert, source, config="main", instruction=HASHES)


@app.command()
def kk(
    out: Out,
    puzzles: Annotated[int, typer.Option(help="Total puzzles; a tenth is held out.", min=10)] = 5000,
    seed: Annotated[int, typer.Option(help="The same seed gives the same puzzles.")] = 0,
    people: Annotated[
        list[int] | None,
        typer.Option(help="Number of people; repeat for several. Default: 3 to 7.", min=2, max=7),
    ] = None,
) -> None:
    """Generated Knights and Knaves: kk-train.parquet and kk-test.parquet, without a common puzzle."""
    with _reporting():
        seen: set[bytes] = set()
        held_out = round(puzzles * HELD_OUT)
        for split, count in (("train", puzzles - held_out), ("test", held_out)):
            found = list(itertools.islice(knights.generate(seed, split, seen, people or PEOPLE), count))
            if len(found) < count:
                raise DataError(f"there are only {len(found)} of {count} different {split} puzzles; allow more people")
            write(out / f"kk-{split}.parquet", (kk_row(puzzle, split, i) for i, puzzle in enumerate(found)))


@app.command("eval")
def evaluation(
    out: Out,
    samples: Annotated[int, typer.Option(help="Samples per problem of AIME and AMC.", min=1)] = 32,
) -> None:
    """All evaluation sets in OUT/eval, with the number of samples per problem for verl. Sets missing in OUT are
    downloaded from the hub first."""
    for name, (command, few) in EVALUATION.items():
        source = out / f"{name}.parquet"
        if not source.exists():
            try:
                globals()[command](out=out)
            except typer.Exit:
                again = f"python -m examples.data.prepare {command} --out {out} --source PATH"
                typer.echo(f"{source} is missing: {again}, then eval again", err=True)
                raise
        with _reporting():
            try:
                table = pq.read_table(source, schema=SCHEMA)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{source} cannot be read: {error}; delete it and call eval again") from error
            rows = ({**row, SAMPLES: samples if few else 1} for row in table.to_pylist())
            write(out / "eval" / source.name, rows, SCHEMA.append(pa.field(SAMPLES, pa.int64())))


def kk_row(puzzle: knights.Puzzle, split: str, index: int) -> Row:
    """Return the row of a puzzle of :mod:`examples.tiny_world.puzzles`, worded for a language model."""
    names = puzzle.names
    said = zip(names, puzzle.statements, strict=True)
    prompt = KK_PROMPT.format(
        count=puzzle.people,
        names=f"{', '.join(names[:-1])} and {names[-1]}",
        said="\n".join(f'{name} says: "{_sentence(statement, names)}"' for name, statement in said),
    )
    truth = knights.describe(knights.solutions(puzzle)[0], names)
    mark = knights.fingerprint(puzzle).hex()
    return make_row("kk", prompt, truth, split, index, ability="logic", id_=mark, level=puzzle.people)


def _sentence(statement: knights.Statement, names: tuple[str, ...]) -> str:
    if statement.operator == "if":
        premise, conclusion = (claim.text(names) for claim in statement.claims)
        return f"If {premise}, then {conclusion}."
    return statement.text(names).replace(" iff ", " if and only if ") + "."


def make_row(
    data_source: str,
    prompt: str,
    ground_truth: Any,
    split: str,
    index: int,
    *,
    ability: str = "math",
    id_: str = "",
    level: int = 0,
) -> Row:
    """Return one row of :data:`SCHEMA`."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": str(ground_truth)},
        "extra_info": {"split": split, "index": index, "id": str(id_), "level": level},
    }


def _answered(row: Row, index: int) -> Converted:
    if row["answer"] is None or not str(row["answer"]).strip():
        raise ValueError(f"'answer' is {row['answer']!r}")
    return row["question"], row["answer"], str(index), 0


def _prepare(
    path: Path,
    name: str,
    split: str,
    columns: tuple[str, ...],
    convert: Callable[[Row, int], Converted],
    source: Path | None,
    config: str | None = None,
    instruction: str = BOXED,
    as_split: str = "",
) -> None:
    """Prepare one split of a data set of questions and answers; see :func:`read`."""

    def rows() -> Iterator[Row]:
        for index, row in enumerate(read(name, split, columns, source, config)):
            try:
                question, truth, id_, level = convert(row, index)
            except (ValueError, TypeError, AttributeError) as error:
                raise DataError(f"{source or name}, row {index}: {error}; is it the right data set?") from error
            prompt = f"{question} {instruction}"
            yield make_row(name, prompt, truth, as_split or split, index, id_=id_, level=level)

    with _reporting():
        write(path, rows())


def _prepare_verl(name: str, source: Path | None, path: Path, split: str) -> None:
    """Prepare a data set in verl's schema that has each problem many times."""
    with _reporting():
        truths: dict[str, set[str]] = {}
        ids: dict[str, str] = {}
        total = 0
        for total, row in enumerate(read(name, "train", ("prompt", "reward_model", "extra_info"), source), 1):
            try:
                # The data set's wording is one user message.
                (message,) = row["prompt"]
                problem, truth = message["content"], row["reward_model"]["ground_truth"]
                ids.setdefault(problem, str((row["extra_info"] or {}).get("index", "")))
                truths.setdefault(problem, set()).add(truth)
            except (TypeError, KeyError, ValueError, AttributeError) as error:
                raise DataError(
                    f"{source or name}, row {total - 1}: not verl's schema, with one message in 'prompt' and a "
                    f"'ground_truth' in 'reward_model' ({error!r}); is it {name}?"
                ) from error
        # A problem with two ground truths is ambiguous.
        clear = [(problem, *found) for problem, found in truths.items() if len(found) == 1]
        typer.echo(f"{total} rows, {len(truths)} problems, {len(truths) - len(clear)} skipped with several answers")
        rows = (
            make_row("math_dapo", problem, truth, split, i, id_=ids[problem])
            for i, (problem, truth) in enumerate(clear)
        )
        write(path, rows)


def read(
    name: str, split: str, columns: tuple[str, ...], source: Path | None = None, config: str | None = None
) -> Iterator[Row]:
    """Yield the rows of one split of a data set, with only the requested ``columns``.

    Args:
        name: Id of the data set on the hub.
        split: Split of the data set.
        columns: Required columns.
        source: Local copy to read instead of the hub: one file, or the folder that ``hf download`` writes.
        config: Config of the data set on the hub.

    Raises:
        DataError: No such data, no network, or a column is missing.
    """
    import datasets

    try:
        if source is not None and source.is_file():
            kind = "parquet" if source.suffix == ".parquet" else "json"
            data = datasets.load_dataset(kind, data_files=str(source), split="train")
        else:
            data = datasets.load_dataset(str(source or name), config, split=split)
        chosen = data.select_columns(list(columns))
    except Exception as error:  # the hub's client has no common error class
        raise DataError(
            f"{name} cannot be read from {source or 'the Hugging Face hub'}: {type(error).__name__}: {error}\n"
            "Without a network, or with HF_HUB_OFFLINE set, download it on another machine "
            f"(hf download --repo-type dataset {name} --local-dir FOLDER) and pass --source FOLDER."
        ) from error
    for table in chosen.with_format("arrow").iter(batch_size=BATCH):
        yield from table.to_pylist()


def write(path: Path, rows: Iterable[Row], schema: pa.Schema = SCHEMA) -> None:
    """Write rows atomically and print their number.

    Raises:
        DataError: There are no rows, or the folder cannot be written to.
    """
    table = pa.Table.from_pylist(list(rows), schema)
    if not table.num_rows:
        raise DataError(f"{path} would have no rows: the source is empty")
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, part)
        part.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error}; choose another --out") from error
    finally:
        part.unlink(missing_ok=True)
    typer.echo(f"{path}: {table.num_rows} rows")


@contextmanager
def _reporting() -> Iterator[None]:
    try:
        yield
    except DataError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
