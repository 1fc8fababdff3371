"""Evaluate samples of a model: accuracy, lengths, confidence.

python -m examples.tiny_world.evaluate --model examples/tiny_world/models/qwen2 --split test
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .puzzles import Puzzle, describe, generate, solutions
from .reward import compute_score
from .sampling import encode_prompt, sample


def evaluate(
    path: Path, puzzles: list[Puzzle], samples: int, seed: int = 0, max_tokens: int = 512
) -> dict[str, object]:
    """Sample each puzzle ``samples`` times at temperature 1.

    Returns:
        Means of ``score``, ``acc`` and ``format``; ``acc_by_people``; ``mixed``, the share of prompts with right and
        wrong responses; ``length`` quantiles (5, 50, 95%) in tokens; ``cut``, the share of truncated responses;
        ``mean_probability`` of the tokens drawn and the share of them ``above_099``.
    """
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompts = [encode_prompt(tokenizer, puzzle.text()) for puzzle in puzzles for _ in range(samples)]
    responses = sample(model, tokenizer, prompts, max_tokens, seed)
    scores = []
    for i, response in enumerate(responses):
        puzzle = puzzles[i // samples]
        scores.append(compute_score(None, response.text, describe(solutions(puzzle)[0], puzzle.names)))
    right = np.array([score["acc"] for score in scores]).reshape(len(puzzles), samples)
    by_people = defaultdict(list)
    for puzzle, row in zip(puzzles, right, strict=True):
        by_people[puzzle.people].append(row.mean())
    lengths = np.array([len(response.tokens) for response in responses])
    chances = np.concatenate([response.probabilities for response in responses])
    return {
        **{part: round(float(np.mean([score[part] for score in scores])), 3) for part in ("score", "acc", "format")},
        "acc_by_people": {n: round(float(np.mean(rows)), 2) for n, rows in sorted(by_people.items())},
        "mixed": round(float(np.mean((right.mean(1) > 0) & (right.mean(1) < 1))), 2),
        "length": np.quantile(lengths, [0.05, 0.5, 0.95]).round().astype(int).tolist(),
        "cut": round(float(np.mean(lengths == max_tokens)), 3),
        "mean_probability": round(float(chances.mean()), 3),
        "above_099": round(float((chances > 0.99).mean()), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--split", choices=("train", "test"), default="test")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    puzzles = list(islice(generate(args.seed, args.split, set()), args.prompts))
    print(json.dumps(evaluate(args.model, puzzles, args.samples, args.seed)))


if __name__ == "__main__":
    main()
