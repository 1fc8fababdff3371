"""Prompts and how long several responses to each were: what a length ranker is trained on and measured with.

    python -m benchmarks.studies.length_pairs OUT.parquet --split train --prompts 1500 --samples 4

The tiny world's Qwen2 (``examples/tiny_world``) answers puzzles of 2 to 7 people at temperature 1, without an engine:
many prompts are wanted here and few responses to each, where the traces of ``benchmarks.traces`` have 64 prompts. The
puzzles of the two splits never meet (``puzzles.fingerprint``); ``puzzles-fresh.parquet``, at which nobody looks while
rankers are made, is of ``--split test --prompts 128 --samples 16 --seed 21``, none of them among the others. For the
second task, :func:`roads`, nothing is sampled by a model: lengths are those of searches that the task's own searcher
writes.
"""

from __future__ import annotations

import random
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from verl_rhyme.lengths.pairs import Pairs

if TYPE_CHECKING:
    from examples.roads.maps import Map

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

MODEL = Path(__file__).parents[2] / "examples" / "tiny_world" / "models" / "qwen2"
FOLDER = Path(__file__).parents[1] / "traces" / "lengths"
LIMIT = 512
_ROWS = 256  # responses that are sampled side by side


def load(path: Path) -> Pairs:
    """What :func:`main` wrote."""
    table = pq.read_table(path)
    return Pairs.from_rows(zip(table["prompt"].to_pylist(), table["lengths"].to_pylist(), strict=True))


def roads(prompts: int, samples: int, seed: str) -> tuple[Pairs, list[Map]]:
    """Road maps, and searches of each written anew (``examples.roads.maps``): wording, order and flaws are drawn."""
    from examples.roads import make, maps
    from examples.tiny_world import tokenizer as tokenizers
    from examples.tiny_world.sampling import encode_prompt

    tokenizer, rng = tokenizers.build(make.vocabulary()), random.Random(f"roads {seed}")
    rows, tasks = [], []
    for _ in range(prompts):
        task = maps.draw(rng)
        tasks.append(task)
        written = [tokenizer.encode(maps.search(task, rng)) for _ in range(samples)]
        rows.append((encode_prompt(tokenizer, task.text()), [len(search) + 1 for search in written]))
    return Pairs.from_rows(rows), tasks


def seen_in_a_map(task: Map) -> list[float]:
    """What who reads the map sees: towns, roads, roads at either end, how far the goal is, how far all towns are from
    start and from goal, and how many towns hang at roads out of the start that do not lead to the goal."""
    start, goal = (_steps_from(task, end) for end in (task.start, task.goal))
    wrong = 0
    for first in task.neighbours(task.start):
        behind = _steps_from(task, first, but=task.start)
        wrong += 0 if task.goal in behind else len(behind)
    ends = [len(task.neighbours(end)) for end in (task.start, task.goal)]
    far = [value for of in (start, goal) for value in (sum(of.values()) / len(of), max(of.values()))]
    return [len(start), len(task.roads), *ends, start[task.goal], *far, wrong]


def _steps_from(task: Map, town: str, but: str = "") -> dict[str, int]:
    """Roads to each town from one, not by way of another."""
    steps, queue = {town: 0}, [town]
    for here in queue:
        for there in task.neighbours(here):
            if there not in steps and there != but:
                steps[there] = steps[here] + 1
                queue.append(there)
    return steps


@app.command()
def main(
    out: Path,
    model: Annotated[Path, typer.Option(help="folder of the policy")] = MODEL,
    split: str = "train",
    prompts: int = 1500,
    samples: int = 4,
    seed: int = 0,
) -> None:
    """Sample, and write a row a prompt as they come: its token ids and the lengths of its responses."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from examples.tiny_world.puzzles import generate
    from examples.tiny_world.sampling import encode_prompt, sample

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    encoded = [encode_prompt(tokenizer, puzzle.text()) for puzzle in islice(generate(seed, split, set()), prompts)]
    rows: list[dict[str, Any]] = []
    lists = pa.list_(pa.int32())
    out.parent.mkdir(parents=True, exist_ok=True)
    began, at_once = time.time(), max(1, _ROWS // samples)
    for at in range(0, len(encoded), at_once):
        some = encoded[at : at + at_once]
        responses = sample(policy, tokenizer, [prompt for prompt in some for _ in range(samples)], LIMIT, seed + at)
        lengths = [len(response.tokens) for response in responses]
        rows += [
            {"prompt": prompt, "lengths": lengths[i * samples : (i + 1) * samples]} for i, prompt in enumerate(some)
        ]
        table = pa.Table.from_pylist(rows, pa.schema([("prompt", lists), ("lengths", lists)]))
        pq.write_table(table, out, compression="zstd", compression_level=19)
        print(f"{len(rows)} of {len(encoded)} prompts, {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    app()
