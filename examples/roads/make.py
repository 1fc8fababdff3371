"""Make the small model of this task, and its data in verl's format.

python -m examples.roads.make model --out DIR        # about twelve minutes on one core
python -m examples.roads.make data --out DIR --tasks 64 --seed 0
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import torch

from examples.tiny_world import tokenizer as tokenizers
from examples.tiny_world.small_task import examples, main, show, write
from examples.tiny_world.train import batches, build_model, fit, save

from . import maps
from .reward import compute_score

#: Training weight of towns, whose choice decides the answer.
WEIGHT = 2.0


def vocabulary() -> list[str]:
    """Return every word of maps and searches."""
    phrases = (*maps.GO, *maps.LOOK, *maps.DEAD, *maps.BACK, *maps.DONE, *maps.MUSING, *maps.TOWNS)
    return tokenizers.complete(re.findall(tokenizers.WORD, " ".join(phrases) + " roads : from to , ."))


def make_model(out: Path, searches: int, seed: int) -> None:
    """Train a LLaMA of 1.7 M parameters on written searches."""
    torch.manual_seed(seed)
    tokenizer = tokenizers.build(vocabulary())
    model = build_model("llama", tokenizer, heads=5, layers=5)
    rng = random.Random(seed)

    def draw() -> tuple[str, str]:
        task = maps.draw(rng)
        return task.text(), maps.search(task, rng)

    made = examples(tokenizer, draw, searches)
    weights = torch.ones(len(tokenizer))
    weights[tokenizer.convert_tokens_to_ids(list(maps.TOWNS))] = WEIGHT
    fit(model, list(batches(made, 8, rng)), weights, lr=2e-3)
    save(model, tokenizer, out)
    show(model, tokenizer, [maps.draw(rng).text() for _ in range(64)], compute_score, seed)


def make_data(out: Path, count: int, seed: int) -> None:
    """Write ``train.parquet`` and ``test.parquet``."""
    rng = random.Random(f"{seed} data")
    tasks = {split: [maps.draw(rng).text() for _ in range(count)] for split in ("train", "test")}
    write(out, tasks, "rhyme/roads", "search")


if __name__ == "__main__":
    main(__doc__, make_model, make_data)
