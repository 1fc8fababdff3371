"""Write puzzles in verl's parquet format.

    python -m examples.tiny_world.data --out DIR --train 64 --test 64 --seed 0

writes ``train.parquet`` and ``test.parquet``. A puzzle's fingerprint determines its split. So no puzzle of one split,
renamed or reworded, is in the other split, and no test puzzle is in the supervised traces.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .puzzles import Puzzle, describe, generate, solutions


def row(source: str, ability: str, prompt: str, truth: str, split: str, index: int, **extra: int) -> dict[str, Any]:
    """Return a row for verl's ``RLHFDataset`` and reward manager."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, **extra},
    }


def puzzle_row(puzzle: Puzzle, split: str, index: int) -> dict[str, Any]:
    truth = describe(solutions(puzzle)[0], puzzle.names)
    return row("rhyme/knights_and_knaves", "logic", puzzle.text(), truth, split, index, people=puzzle.people)


def write(out: Path, split: str, count: int, seed: int, people: tuple[int, ...] = ()) -> Path:
    """Write ``count`` different puzzles of one split and return the file's path.

    Raises:
        ValueError: Fewer different puzzles exist for these numbers of people.
    """
    rows = [
        puzzle_row(puzzle, split, i) for i, puzzle in enumerate(islice(generate(seed, split, set(), people), count))
    ]
    if len(rows) < count:
        raise ValueError(f"{split}: only {len(rows)} of {count} different puzzles found; allow more people (--people)")
    path = out / f"{split}.parquet"
    out.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--train", type=int, default=64, help="puzzles in train.parquet")
    parser.add_argument("--test", type=int, default=64, help="puzzles in test.parquet")
    parser.add_argument("--people", type=int, nargs="*", default=(), help="numbers of people; default: 2 to 7, mixed")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.time()
    for split, count in (("train", args.train), ("test", args.test)):
        print(f"{write(args.out, split, count, args.seed, tuple(args.people))}: {count} puzzles")
    print(f"{time.time() - start:.1f} s")


if __name__ == "__main__":
    main()
