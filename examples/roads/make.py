"""Make the small model of this task, and its data in verl's format.

python -m examples.roads.make model --out DIR        # about twelve minutes on one core
python -m examples.roads.make data --out DIR --maps 64 --seed 0
"""

from __future__ import annotations

import argparse
import random
import re
from pathlib import Path

import torch

from examples.tiny_world import tokenizer as tokenizers
from examples.tiny_world.sampling import encode_prompt
from examples.tiny_world.small_task import show, write
from examples.tiny_world.train import batches, build_model, fit, save

from . import maps
from .reward import compute_score

#: Maximum tokens of a search; longer ones are skipped.
MAX_RESPONSE = 380
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
    made = []
    while len(made) < searches:
        task = maps.draw(rng)
        prompt = encode_prompt(tokenizer, task.text())
        response = [*tokenizer.encode(maps.search(task, rng)), tokenizer.eos_token_id]
        if len(response) <= MAX_RESPONSE:
            made.append((prompt + response, len(prompt)))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("model", "data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--searches", type=int, default=14000)
    parser.add_argument("--maps", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "model":
        make_model(args.out, args.searches, args.seed)
    else:
        make_data(args.out, args.maps, args.seed)


if __name__ == "__main__":
    main()
