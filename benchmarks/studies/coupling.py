"""How much of a response repeats under newer weights? Coupled sampling against drafts verified by rejection.

    python -m benchmarks.studies.coupling [--json] [--quick]

The tiny world's Qwen2 answers puzzles with keyed noise. Copies of it take policy-gradient steps on other answers of its
own (advantages within a prompt's group, AdamW), and each newer policy is teacher-forced along the old answers: at every
token the total variation between the two policies, whether the same noise draws the same token, and the newer policy's
probability of the old token, which is how often rejection sampling accepts it as a draft. Everything at temperature 1.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.machine import print_row
from examples.tiny_world import puzzles
from examples.tiny_world.reward import compute_score
from examples.tiny_world.sampling import encode_prompt, sample
from verl_rhyme.sampling.noise import draw, key_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

MODEL = Path(__file__).parents[2] / "examples/tiny_world/models/qwen2"
#: Learning rate and updates of each newer policy; the tiny recipe's rate is 3e-4.
LEVELS = [(0.0, 0), (1e-5, 1), (1e-5, 4), (1e-4, 1), (1e-4, 4), (3e-4, 1), (3e-4, 4), (1e-3, 1), (1e-3, 4)]
GROUP = 8
#: Responses of one update.
BATCH = 64


class Texts:
    """Prompts with sampled responses, padded on the right.

    Attributes:
        ids: int64 [n, longest], prompt and response.
        drawn: bool [n, longest - 1], where the next token is one of the response.
    """

    def __init__(self, prompts: list[list[int]], responses: list[list[int]], pad: int) -> None:
        whole = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
        longest = max(map(len, whole))
        self.ids = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in whole])
        at = torch.arange(1, longest)[None]
        first, end = (torch.tensor([len(tokens) for tokens in texts])[:, None] for texts in (prompts, whole))
        self.drawn = (at >= first) & (at < end)

    def rows(self, size: int) -> Iterator[slice]:
        return (slice(i, i + size) for i in range(0, len(self.ids), size))


def answers(model: Any, tokenizer: Any, seed: int, prompts: int, group: int) -> tuple[Texts, np.ndarray, np.ndarray]:
    """Responses drawn with keyed noise; their keys (uint64 [n]) and rewards (float [n])."""
    chosen = list(islice(puzzles.generate(seed, "train"), prompts))
    encoded = [encode_prompt(tokenizer, puzzle.text()) for puzzle in chosen for _ in range(group)]
    keys = np.array([key_of(seed, i // group, i % group) for i in range(len(encoded))], dtype=np.uint64)
    lengths = np.array([len(prompt) for prompt in encoded])

    def coupled(logits: torch.Tensor, rows: list[int], step: int) -> torch.Tensor:
        return torch.from_numpy(draw(logits.numpy(), keys[rows], lengths[rows] + step))

    responses = sample(model, tokenizer, encoded, draw=coupled)
    truths = [puzzles.describe(puzzles.solutions(puzzle)[0], puzzle.names) for puzzle in chosen]
    scores = [compute_score(None, r.text, truths[i // group])["score"] for i, r in enumerate(responses)]
    return Texts(encoded, [r.tokens for r in responses], tokenizer.pad_token_id), keys, np.array(scores)


def policies(model: Any, texts: Texts, rewards: np.ndarray, seed: int, levels: list) -> Iterator[tuple[Any, Any]]:
    """Each level and the policy it leads to; the levels of one learning rate are stations of one training."""
    groups = rewards.reshape(-1, GROUP)
    advantages = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + 1e-6)
    weights = torch.from_numpy(advantages.ravel()).float()
    for rate in dict.fromkeys(rate for rate, _ in levels):
        newer = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(newer.parameters(), lr=rate, weight_decay=0.01)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(weights)))
        wanted = [updates for r, updates in levels if r == rate]
        for update in range(max(wanted) + 1):
            if update in wanted:
                yield (rate, update), newer
            if update == max(wanted):
                break
            batch = order[update * BATCH % len(order) :][:BATCH]
            loss = -(log_probs(newer, texts, batch) * weights[batch][:, None] * texts.drawn[batch]).sum()
            (loss / texts.drawn[batch].sum()).backward()
            torch.nn.utils.clip_grad_norm_(newer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def log_probs(model: Any, texts: Texts, rows: Any) -> torch.Tensor:
    """float32 [n, longest - 1], of the tokens there are."""
    ids = texts.ids[rows]
    return model(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


@torch.no_grad()
def compare(older: Any, newer: Any, texts: Texts, keys: np.ndarray) -> dict[str, float]:
    """Per token along the old texts, and per text up to the first difference."""
    distance, same, chance, coupled_run, rejection_run = [], [], [], [], []
    for rows in texts.rows(32):
        ids, drawn = texts.ids[rows], texts.drawn[rows].numpy()
        old, new = (model(input_ids=ids[:, :-1]).logits.float() for model in (older, newer))
        distance.append(((old.softmax(-1) - new.softmax(-1)).abs().sum(-1) / 2).numpy()[drawn])
        row, at = drawn.nonzero()
        tokens = draw(new.numpy()[drawn], keys[rows][row], at + 1)
        agrees = tokens == ids[:, 1:].numpy()[drawn]
        p = new.softmax(-1).gather(2, ids[:, 1:, None])[..., 0].double().numpy()[drawn]
        same.append(agrees)
        chance.append(p)
        for text in np.split(np.arange(len(row)), drawn.sum(1).cumsum()[:-1]):
            coupled_run.append(agrees[text].cumprod().sum())
            rejection_run.append(p[text].cumprod().sum())  # its expectation
    tv = np.concatenate(distance)
    tokens_each = len(tv) / len(keys)
    return {
        "tv": tv.mean(),
        "coupled": np.concatenate(same).mean(),
        "bound": ((1 - tv) / (1 + tv)).mean(),
        "maximal": (1 - tv).mean(),
        "rejection": np.concatenate(chance).mean(),
        "coupled_run": np.mean(coupled_run),
        "rejection_run": np.mean(rejection_run),
        "length": tokens_each,
    }


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="one seed, few puzzles, three policies")] = False,
) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    seeds, prompts, levels = ([0], 8, [LEVELS[0], LEVELS[3], LEVELS[5]]) if quick else ([0, 1, 2], 32, LEVELS)
    found: dict[tuple[float, int], list[dict[str, float]]] = {level: [] for level in levels}
    for seed in seeds:
        trained, _, rewards = answers(model, tokenizer, 100 + seed, prompts, GROUP)
        texts, keys, _ = answers(model, tokenizer, seed, 2 * prompts, 2)
        for level, newer in policies(model, trained, rewards, seed, levels):
            found[level].append(compare(model, newer, texts, keys))
    for (rate, updates), each in found.items():
        row: dict[str, Any] = {"benchmark": "coupling", "lr": rate, "updates": updates, "seeds": len(seeds)}
        for name in each[0]:
            values = [figures[name] for figures in each]
            row[name] = round(float(np.mean(values)), 5)
            row[f"{name}_sd"] = round(float(np.std(values, ddof=1)), 5) if len(values) > 1 else None
        print_row(row, as_json)


if __name__ == "__main__":
    app()
