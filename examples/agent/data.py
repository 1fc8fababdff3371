"""Write questions in verl's parquet format.

python -m examples.agent.data --out DIR --train 64 --test 64 --seed 0
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from examples.tiny_world.data import row

from .tasks import questions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--train", type=int, default=64, help="questions in train.parquet")
    parser.add_argument("--test", type=int, default=64, help="questions in test.parquet")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", args.train), ("test", args.test)):
        drawn = islice(questions(args.seed, split), count)
        rows = [row("rhyme/agent", "search", each.text(), each.answer(), split, i) for i, each in enumerate(drawn)]
        pq.write_table(pa.Table.from_pylist(rows), args.out / f"{split}.parquet")
        print(f"{args.out / split}.parquet: {count} questions")


if __name__ == "__main__":
    main()
