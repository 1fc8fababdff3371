"""Sample responses from a small model on a CPU without an engine, for checks of training and for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Response:
    """Response; ``tokens`` end with the end-of-sequence token unless truncated; ``probabilities`` belong to them."""

    text: str
    tokens: list[int]
    probabilities: list[float]


def encode_prompt(tokenizer: PreTrainedTokenizerFast, content: str) -> list[int]:
    """Return the token ids of one user turn and the start of the answer."""
    messages = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    max_tokens: int = 512,
    seed: int = 0,
    draw: Callable[[torch.Tensor, list[int], int], torch.Tensor] | None = None,
) -> list[Response]:
    """Return one response per prompt at temperature 1, in the order of ``prompts``; repeat a prompt for several.

    ``draw(logits, rows, step)`` returns the tokens (int64 [n]) of these rows of ``prompts`` at position ``step`` of the
    responses, from float32 logits [n, vocabulary]; default: torch's generator with ``seed``.
    """
    generator = torch.Generator().manual_seed(seed)
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    drawn: list[list[int]] = [[] for _ in prompts]
    chances: list[list[float]] = [[] for _ in prompts]
    rows = torch.arange(len(prompts))
    position = (mask.cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache()
    for step in range(max_tokens):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position, past_key_values=cache).logits[:, -1]
        probabilities = logits.float().softmax(-1)
        if draw is None:
            token = torch.multinomial(probabilities, 1, generator=generator)
        else:
            token = draw(logits.float(), rows.tolist(), step)[:, None]
        chance = probabilities.gather(1, token)
        for row, t, p in zip(rows.tolist(), token[:, 0].tolist(), chance[:, 0].tolist(), strict=True):
            drawn[row].append(t)
            chances[row].append(p)
        going = (token[:, 0] != tokenizer.eos_token_id).nonzero()[:, 0]
        if not len(going):
            break
        if len(going) < len(rows):
            cache.batch_select_indices(going)
        rows, ids = rows[going], token[going]
        mask = torch.cat([mask[going], torch.ones_like(ids)], 1)
        position = mask.sum(1, keepdim=True) - 1
    texts = tokenizer.batch_decode(drawn, skip_special_tokens=True)
    return [Response(*columns) for columns in zip(texts, drawn, chances, strict=True)]
