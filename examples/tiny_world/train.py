"""Train the tiny models on solver traces (supervised).

python -m examples.tiny_world.train --arch qwen2 --out examples/tiny_world/models/qwen2
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from . import tokenizer as tokenizers
from .evaluate import evaluate
from .puzzles import generate
from .sampling import encode_prompt
from .traces import DECISIVE, FLAWS, trace

MAX_RESPONSE = 500  # longer traces are skipped; responses are truncated at 512
DECISIVE_WEIGHT = 3.0
FIRST_SHARE, FIRST_PEOPLE = 0.4, (2, 3)  # traces with few people come first: the model learns to look up sooner
BATCH = 8


def build_model(arch: str, tokenizer: PreTrainedTokenizerFast, heads: int = 4, layers: int = 4) -> PreTrainedModel:
    """Return an untrained model, by default with 0.8 M parameters; head size 32, as vLLM's CPU attention needs."""
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32 * heads,
        "intermediate_size": 96 * heads,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    kinds: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    config_class, model_class = kinds[arch]
    model = model_class(config_class(**shape))
    look_back(model)
    return model


@torch.no_grad()
def look_back(model: PreTrainedModel, strength: float = 6.0, frequencies: int = 6) -> None:
    """Initialise the first layer's heads to look 1, 2, 3, ... tokens back.

    To recall a statement the model needs two layers that are useless without each other; a random start spends most of
    the training on that. Hidden unit 0 starts equal for all tokens and serves as a bias:
    constant queries and keys, rotated against each other by the wanted distance on the fastest rotary frequencies.
    """
    embedding, layer = model.get_input_embeddings().weight, model.model.layers[0]
    size, half = layer.self_attn.head_dim, layer.self_attn.head_dim // 2
    embedding[:, 0] = 0.3
    hidden = layer.input_layernorm(embedding)[:, 0].mean()
    angle = model.model.rotary_emb.inv_freq[:frequencies]
    for head in range(model.config.num_attention_heads):
        rows = torch.arange(frequencies) + head * size
        for projection, phase in ((layer.self_attn.q_proj, -(head + 1) * angle), (layer.self_attn.k_proj, 0 * angle)):
            projection.weight[rows, 0] = strength / hidden * phase.cos()
            projection.weight[rows + half, 0] = strength / hidden * phase.sin()


Example = tuple[list[int], int]


def examples(tokenizer: PreTrainedTokenizerFast, count: int, seed: int, people: tuple[int, ...] = ()) -> list[Example]:
    """Return ``count`` sequences of token ids (prompt, trace, end) of the train split, with the prompt's length."""
    rng = random.Random(seed)
    made: list[Example] = []
    for puzzle in generate(seed, "train", people=people):
        prompt = encode_prompt(tokenizer, puzzle.text())
        response = [*tokenizer.encode(trace(puzzle, rng, FLAWS)), tokenizer.eos_token_id]
        if len(response) <= MAX_RESPONSE:
            made.append((prompt + response, len(prompt)))
        if len(made) == count:
            break
    return made


def batches(made: list[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """Yield batches of similar length in random order: sorted within windows of 50 batches."""
    made = made[:]
    rng.shuffle(made)
    for start in range(0, len(made), 50 * size):
        window = sorted(made[start : start + 50 * size], key=lambda example: len(example[0]))
        cuts = list(range(0, len(window), size))
        rng.shuffle(cuts)
        yield from (window[cut : cut + size] for cut in cuts)


def loss_of(model: PreTrainedModel, batch: list[Example], weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted mean cross-entropy over response tokens; ``weights`` has one weight per vocabulary entry."""
    width = max(len(tokens) for tokens, _ in batch)
    ids = torch.full((len(batch), width), model.config.pad_token_id)
    target = torch.full((len(batch), width), -100)
    for row, (tokens, prompt) in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        target[row, prompt : len(tokens)] = torch.tensor(tokens[prompt:])
    # Padding on the right needs no mask with causal attention.
    logits = model(input_ids=ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), weight=weights)


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    count: int,
    lr: float,
    seed: int,
) -> None:
    """Train one pass over ``count`` traces, first those of puzzles with few people."""
    weights = torch.ones(model.config.vocab_size)
    weights[tokenizer.convert_tokens_to_ids(sorted(DECISIVE))] = DECISIVE_WEIGHT
    first = int(FIRST_SHARE * count)
    easy, rest = examples(tokenizer, first, seed, FIRST_PEOPLE), examples(tokenizer, count - first, seed)
    order = [*batches(easy, BATCH, random.Random(seed)), *batches(rest, BATCH, random.Random(seed))]
    fit(model, order, weights, lr)


def fit(model: PreTrainedModel, order: list[list[Example]], weights: torch.Tensor, lr: float) -> None:
    """Train one step per batch: AdamW, linear warm-up over 5% of the steps and linear decay to 0."""
    steps = len(order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.05 * steps), (steps - step) / (0.95 * steps))
    )
    start, seen, running = time.time(), 0, 0.0
    model.train()
    for step, batch in enumerate(order, 1):
        loss = loss_of(model, batch, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        seen += sum(len(tokens) - prompt for tokens, prompt in batch)
        running = loss.item() if step == 1 else 0.98 * running + 0.02 * loss.item()
        if step % 100 == 0 or step == steps:
            print(
                f"step {step}/{steps} loss {running:.4f} tokens {seen / 1e6:.2f} M {time.time() - start:.0f} s",
                flush=True,
            )
    model.eval()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a Hugging Face folder with bfloat16 weights."""
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizers.save(tokenizer, model.config, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", choices=("qwen2", "llama"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--init", type=Path, help="folder of a model of either architecture to start from")
    parser.add_argument("--traces", type=int, default=24000, help="supervised traces, each seen once")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = tokenizers.build()
    model = build_model(args.arch, tokenizer)
    print(f"{args.arch}: {model.num_parameters() / 1e6:.2f} M parameters, vocabulary {len(tokenizer)}")
    if args.init:
        # The two differ only in Qwen2's biases of queries, keys and values; Llama learns to do without them.
        model.load_state_dict(load_file(args.init / "model.safetensors"), strict=False)
        model.tie_weights()
    train(model, tokenizer, args.traces, args.lr, args.seed)
    save(model, tokenizer, args.out)
    print(evaluate(args.out, list(islice(generate(args.seed, "test", set()), 128)), samples=4, seed=args.seed))


if __name__ == "__main__":
    main()
