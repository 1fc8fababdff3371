"""Make the small model of this task, and its data in verl's format.

python -m examples.countdown.make model --out DIR        # about ten minutes on one core
python -m examples.countdown.make data --out DIR --tasks 64 --seed 0
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import torch

from examples.tiny_world import tokenizer as tokenizers
from examples.tiny_world.small_task import examples, main, show, write
from examples.tiny_world.train import batches, build_model, fit, save

from . import sums
from .reward import compute_score

#: Training weights of numbers, and of the tokens after a result, which depend on whether it is the goal.
WEIGHT, DECISIVE = 2.0, 3.0
NUMBERS = [str(n) for n in range(1, sums.LIMIT + 1)]


def vocabulary() -> list[str]:
    """Return every word of tasks and searches."""
    phrases = (*sums.TRY, *sums.LEFT, *sums.SMALL, *sums.BIG, *sums.BACK, *sums.MUSING, *sums.DONE, *sums.SIGNS)
    return tokenizers.complete([*re.findall(tokenizers.WORD, " ".join(phrases) + " make from for = , ."), *NUMBERS])


def make_model(out: Path, searches: int, seed: int) -> None:
    """Train a Qwen2 of 0.9 M parameters on written searches."""
    torch.manual_seed(seed)
    tokenizer = tokenizers.build(vocabulary())
    model = build_model("qwen2", tokenizer)
    rng = random.Random(seed)

    def draw() -> tuple[str, str]:
        task = sums.draw(rng, supervised=True)
        return task.text(), sums.search(task, rng)

    made = examples(tokenizer, draw, searches)
    weights = torch.ones(len(tokenizer))
    weights[tokenizer.convert_tokens_to_ids(NUMBERS)] = WEIGHT
    weights[tokenizer.convert_tokens_to_ids([".", ","])] = DECISIVE
    fit(model, list(batches(made, 8, rng)), weights, lr=2e-3)
    save(model, tokenizer, out)
    show(model, tokenizer, [sums.draw(rng, supervised=False).text() for _ in range(64)], compute_score, seed)


def make_data(out: Path, count: int, seed: int) -> None:
    """Write ``train.parquet`` and ``test.parquet`` with different tasks, none used in training."""
    rng = random.Random(f"{seed} data")
    made: dict[str, None] = {}
    while len(made) < 2 * count:
        made[sums.draw(rng, supervised=False).text()] = None
    tasks = list(made)
    write(out, {"train": tasks[:count], "test": tasks[count:]}, "rhyme/countdown", "arithmetic")


if __name__ == "__main__":
    main(__doc__, make_model, make_data)
