"""What the order of training does to gradients: sorted by length against shuffled.

    python -m benchmarks.sorted_gradients [--json] [--quick]

The tiny world's Qwen2 answers puzzles; the policy gradient (GRPO advantages) of every response is computed on its own,
so that the gradient of any mini-batch under any of verl's normalisations is a sum. Of each order: the mean of its
mini-batches' gradients against the whole batch's (the bias, to first order, of the steps one after the other), and how
far single mini-batches stray from it. ``order`` is that of ``sorting.order``, 1 sorted and 0 shuffled; ``groups`` keeps
a prompt's responses together and sorts by their mean length: the updates of a load, as SortedRL harvests them for GRPO.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.machine import commit
from examples.tiny_world import puzzles
from examples.tiny_world.reward import compute_score
from examples.tiny_world.sampling import encode_prompt, sample
from verl_rhyme.scheduling.training_order import mixed_ranks, sortedness

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

MODEL = Path(__file__).parents[1] / "examples/tiny_world/models/qwen2"
GROUP, MINI_BATCHES, LONGEST = 8, 4, 384
#: How often a random order is drawn.
DRAWS = 8


def responses(prompts: int, seed: int) -> tuple[Any, list[list[int]], list[list[int]], np.ndarray]:
    """The model, prompts and responses of whole groups, and each response's GRPO advantage."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    chosen = [p for p in islice(puzzles.generate(seed, "train"), 4 * prompts) if len(p.names) <= 3][:prompts]
    encoded = [encode_prompt(tokenizer, puzzle.text()) for puzzle in chosen for _ in range(GROUP)]
    drawn = sample(model, tokenizer, encoded, seed=seed, max_tokens=LONGEST)
    truths = [puzzles.describe(puzzles.solutions(puzzle)[0], puzzle.names) for puzzle in chosen]
    scores = np.array([compute_score(None, r.text, truths[i // GROUP])["score"] for i, r in enumerate(drawn)])
    groups = scores.reshape(-1, GROUP)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    return model, encoded, [r.tokens for r in drawn], advantages.ravel()


def gradients(model: Any, prompts: list[list[int]], texts: list[list[int]], advantages: np.ndarray) -> torch.Tensor:
    """float32 [responses, parameters]: of the sum over its tokens of advantage times log-probability."""
    rows = []
    for prompt, text, advantage in zip(prompts, texts, advantages, strict=True):
        model.zero_grad()
        ids = torch.tensor([prompt + text])
        log_probs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        (advantage * log_probs.gather(1, torch.tensor(text)[:, None]).sum()).backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return torch.stack(rows)


def compare(grads: torch.Tensor, lengths: np.ndarray, order: np.ndarray, aggregation: str) -> tuple[float, ...]:
    """Cosine and norm ratio of the mini-batches' mean gradient to the batch's; their spread over its norm."""

    def of(rows: np.ndarray) -> torch.Tensor:
        if aggregation == "token-mean":
            return grads[rows].sum(0) / lengths[rows].sum()
        if aggregation == "seq-mean-token-sum-norm":  # with loss_scale_factor
            return grads[rows].mean(0) / LONGEST
        return (grads[rows] / torch.tensor(lengths[rows], dtype=torch.float32)[:, None]).mean(0)

    whole = of(order)
    parts = torch.stack([of(piece) for piece in np.split(order, MINI_BATCHES)])
    mean = parts.mean(0)
    cosine = torch.cosine_similarity(mean, whole, dim=0)
    spread = (parts - mean).norm(dim=1).pow(2).mean().sqrt()
    return float(cosine), float(mean.norm() / whole.norm()), float(spread / whole.norm())


def orders(lengths: np.ndarray) -> Iterator[tuple[float | str, np.ndarray]]:
    """Names and permutations of responses of which ``GROUP`` after one another have a prompt."""
    for knob in (1.0, 0.5, 0.0):
        for draw in range(1 if knob == 1.0 else DRAWS):
            yield knob, mixed_ranks(lengths, knob, np.random.default_rng(draw))
    groups = np.argsort(lengths.reshape(-1, GROUP).mean(1), kind="stable")
    yield "groups", (groups[:, None] * GROUP + np.arange(GROUP)).ravel()


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="few responses, one seed")] = False,
) -> None:
    """Measure and print."""
    found: dict[tuple[str, float | str], list[tuple[float, ...]]] = {}
    correlations = []
    for seed in range(1 if quick else 3):
        model, prompts, texts, advantages = responses(8 if quick else 16, seed)
        lengths = np.array([len(text) for text in texts])
        correlations.append(float(np.corrcoef(lengths, advantages)[0, 1]))
        grads = gradients(model, prompts, texts, advantages)
        for aggregation in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
            for knob, order in orders(lengths):
                row = (*compare(grads, lengths, order, aggregation), sortedness(lengths[order]))
                found.setdefault((aggregation, knob), []).append(row)
    for (aggregation, knob), rows in found.items():
        names = ("cosine", "norm_ratio", "mini_batch_spread", "sortedness")
        means = dict(zip(names, np.mean(rows, axis=0).round(4).tolist(), strict=True))
        shown = {
            "benchmark": "sorted_gradients",
            "loss_agg_mode": aggregation,
            "order": knob,
            **means,
            "cosine_least": round(min(row[0] for row in rows), 4),
            "length_advantage_correlation": [round(c, 3) for c in correlations],
            "mini_batches": MINI_BATCHES,
            "commit": commit(),
        }
        print(json.dumps(shown) if as_json else shown, flush=True)


if __name__ == "__main__":
    app()
