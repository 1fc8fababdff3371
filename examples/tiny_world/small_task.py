"""Shared code of the small tasks besides the puzzles: training examples, evaluation, data in verl's format, command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .sampling import encode_prompt, sample
from .train import Example

#: Maximum tokens of a search; longer ones are skipped.
MAX_RESPONSE = 380


def examples(tokenizer: Any, draw: Callable[[], tuple[str, str]], count: int) -> list[Example]:
    """Return training examples of tasks with their written searches, as ``draw`` returns them."""
    made: list[Example] = []
    while len(made) < count:
        task, search = draw()
        prompt, response = encode_prompt(tokenizer, task), [*tokenizer.encode(search), tokenizer.eos_token_id]
        if len(response) <= MAX_RESPONSE:
            made.append((prompt + response, len(prompt)))
    return made


def show(model: Any, tokenizer: Any, tasks: Sequence[str], score: Callable[..., dict[str, Any]], seed: int) -> None:
    """Print the share of right answers, their length and probability, and the first answer.

    Args:
        model, tokenizer: Model and tokenizer of transformers.
        tasks: Texts; each is its own ground truth.
        score: Reward function of verl; its ``acc`` is 0 or 1.
        seed: Seed of the sampling.
    """
    responses = sample(model.float(), tokenizer, [encode_prompt(tokenizer, task) for task in tasks], 384, seed)
    right = [score(None, response.text, task)["acc"] for response, task in zip(responses, tasks, strict=True)]
    chances = [p for response in responses for p in response.probabilities]
    print(
        f"right {sum(right) / len(right):.2f}, tokens {sum(len(r.tokens) for r in responses) / len(tasks):.0f}, "
        f"mean probability {sum(chances) / len(chances):.3f}\n{tasks[0]}\n{responses[0].text}"
    )


def write(out: Path, splits: dict[str, list[str]], source: str, ability: str) -> None:
    """Write tasks as ``SPLIT.parquet``.

    Args:
        out: Folder; created if missing.
        splits: Texts of tasks by split; each is its own ground truth.
        source, ability: Values of ``data_source`` and ``ability`` in all rows.
    """
    out.mkdir(parents=True, exist_ok=True)
    for split, tasks in splits.items():
        rows = [
            {
                "data_source": source,
                "prompt": [{"role": "user", "content": task}],
                "ability": ability,
                "reward_model": {"style": "rule", "ground_truth": task},
                "extra_info": {"split": split, "index": i},
            }
            for i, task in enumerate(tasks)
        ]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")


def main(about: str, make_model: Callable[[Path, int, int], None], make_data: Callable[[Path, int, int], None]) -> None:
    """Run a task's command: make its model (folder, searches, seed) or its data (folder, tasks of a split, seed)."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("what", choices=("model", "data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--searches", type=int, default=14000)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "model":
        make_model(args.out, args.searches, args.seed)
    else:
        make_data(args.out, args.tasks, args.seed)
