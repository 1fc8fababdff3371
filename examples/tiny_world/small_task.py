"""Shared code of the small tasks besides the puzzles: their models, their data in verl's format, their command."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from . import tokenizer as tokenizers
from .data import row
from .sampling import encode_prompt, sample
from .train import BATCH, Example, batches, build_model, fit, save

#: Maximum tokens of a search; longer ones are skipped.
MAX_RESPONSE = 380


@dataclass(frozen=True)
class SmallTask:
    """A task and its model. A drawn task has a method ``text()``, its prompt and ground truth."""

    source: str  # ``data_source`` of its rows
    ability: str
    phrases: tuple[str, ...]  # all words of tasks and searches
    weights: Mapping[str, float]  # training weights of words; others have 1
    draw: Callable[[random.Random, bool], Any]  # a task for training, or a prompt
    search: Callable[[Any, random.Random], str]  # its written search
    score: Callable[..., dict[str, Any]]  # reward function of verl
    model: Mapping[str, Any]  # arguments of build_model


def make_model(task: SmallTask, out: Path, searches: int, seed: int) -> None:
    """Train a model on written searches."""
    torch.manual_seed(seed)
    tokenizer = tokenizers.build(tokenizers.complete(re.findall(tokenizers.WORD, " ".join(task.phrases))))
    model = build_model(tokenizer=tokenizer, **task.model)
    rng = random.Random(seed)
    made: list[Example] = []
    while len(made) < searches:
        drawn = task.draw(rng, True)
        prompt = encode_prompt(tokenizer, drawn.text())
        response = [*tokenizer.encode(task.search(drawn, rng)), tokenizer.eos_token_id]
        if len(response) <= MAX_RESPONSE:
            made.append((prompt + response, len(prompt)))
    weights = torch.ones(len(tokenizer))
    weights[tokenizer.convert_tokens_to_ids(list(task.weights))] = torch.tensor(list(task.weights.values()))
    fit(model, list(batches(made, BATCH, rng)), weights, lr=2e-3)
    save(model, tokenizer, out)
    prompts = [task.draw(rng, False).text() for _ in range(64)]
    responses = sample(model.float(), tokenizer, [encode_prompt(tokenizer, each) for each in prompts], 384, seed)
    right = [task.score(None, response.text, each)["acc"] for response, each in zip(responses, prompts, strict=True)]
    chances = [p for response in responses for p in response.probabilities]
    print(
        f"right {sum(right) / len(right):.2f}, tokens {sum(len(r.tokens) for r in responses) / len(prompts):.0f}, "
        f"mean probability {sum(chances) / len(chances):.3f}\n{prompts[0]}\n{responses[0].text}"
    )


def make_data(task: SmallTask, out: Path, count: int, seed: int) -> None:
    """Write ``train.parquet`` and ``test.parquet`` with different tasks, none used in training."""
    rng = random.Random(f"{seed} data")
    made: dict[str, None] = {}
    while len(made) < 2 * count:
        made[task.draw(rng, False).text()] = None
    out.mkdir(parents=True, exist_ok=True)
    for split, texts in (("train", list(made)[:count]), ("test", list(made)[count:])):
        rows = [row(task.source, task.ability, text, text, split, i) for i, text in enumerate(texts)]
        pq.write_table(pa.Table.from_pylist(rows), out / f"{split}.parquet")


def main(about: str, task: SmallTask) -> None:
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("what", choices=("model", "data"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--searches", type=int, default=14000)
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.what == "model":
        make_model(task, args.out, args.searches, args.seed)
    else:
        make_data(task, args.out, args.tasks, args.seed)
