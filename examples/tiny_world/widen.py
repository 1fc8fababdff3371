"""Copy the tiny Qwen2 with a vocabulary of real size, for code that depends on it: sampler, budget, memory.

    python -m examples.tiny_world.widen --variant zipf OUT

Words keep their ids, their tokenizer and (up to 0.003 nats per token) their relative probabilities. Added entries
decode to nothing and embed as the unknown word. Variants: ``silent``, added entries are never probable; ``zipf``, they
have a Zipf tail with a mean of :data:`SHARE` of the mass over the model's own states.

A linear head has no bias, so one hidden unit becomes a feature that is positive in every state: constant in the
residual stream, and so 1 / RMS of it after the final norm. No layer writes or reads it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from .puzzles import generate
from .sampling import encode_prompt, sample

MODEL = Path(__file__).parent / "models" / "qwen2"
VARIANTS = ("silent", "zipf")
#: Vocabulary size of Qwen2.5 and Qwen3.
VOCABULARY = 151_936
#: Hidden unit that becomes the feature; any except the first costs almost nothing.
UNIT = 25
#: Its value in the residual stream: small relative to the embeddings.
CONSTANT = 1 / 16
#: ``silent``: distance of added logits below the words' mean, times the feature. The feature has mean 1 and stays above
#: 1/30 while the RMS of the residual stream is below 240 (observed: 3 to 30).
DEPTH = 1024.0
#: ``zipf``: mass of the added entries, and exponent of their ranks.
SHARE, EXPONENT = 0.1, 1.0
#: Noise of each added logit over the states, so that the order of entries varies.
JITTER = 0.3


def widen(variant: str, out: Path, vocabulary: int = VOCABULARY) -> None:
    """Write the untied model with its tokenizer; ``out`` appears only when complete.

    Args:
        variant: One of :data:`VARIANTS`.
        out: Folder that does not exist.
        vocabulary: Total entries.
    """
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    loaded = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    words = len(tokenizer)
    free_unit(loaded)
    hidden = states(loaded, tokenizer)
    loaded.model.norm.weight.data[UNIT] /= hidden[:, UNIT].mean()
    hidden[:, UNIT] /= hidden[:, UNIT].mean()
    head = loaded.lm_head.weight.detach()[:words]
    if variant == "silent":
        rows = head.mean(0).repeat(vocabulary - words, 1)
        rows[:, UNIT] -= DEPTH
    else:
        rows = tail(hidden, head, vocabulary - words)
    noise = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    noise[:, UNIT] = 0
    rows += JITTER * noise / hidden.norm(dim=1).mean()
    embedding = loaded.get_input_embeddings().weight.detach()[:words]
    embedding = torch.cat([embedding, embedding[tokenizer.unk_token_id].expand(len(rows), -1)])
    loaded.config.vocab_size = vocabulary
    loaded.model.embed_tokens.weight = nn.Parameter(embedding)
    loaded.lm_head.weight = nn.Parameter(torch.cat([head, rows]))
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(MODEL, part)
    loaded.bfloat16().save_pretrained(part)
    part.rename(out)


@torch.no_grad()
def free_unit(model: PreTrainedModel) -> None:
    """Untie the model, and make :data:`UNIT` a constant that no layer reads or writes and the final norm keeps."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    model.lm_head.weight[:, UNIT] = 0
    model.get_input_embeddings().weight[:, UNIT] = CONSTANT
    for layer in model.model.layers:
        layer.input_layernorm.weight[UNIT] = layer.post_attention_layernorm.weight[UNIT] = 0
        layer.self_attn.o_proj.weight[UNIT] = layer.mlp.down_proj.weight[UNIT] = 0
    model.model.norm.weight[UNIT] = 1


@torch.no_grad()
def states(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return hidden states of the model's own responses with some unknown words; float32 [states, hidden]."""
    asked = [encode_prompt(tokenizer, puzzle.text()) for puzzle in islice(generate(0, "train"), 48)]
    random = torch.Generator().manual_seed(0)
    found = []
    for prompt, response in zip(asked, sample(model, tokenizer, asked, max_tokens=256), strict=True):
        tokens = torch.tensor(response.tokens)
        unknown = torch.rand(len(tokens), generator=random) < SHARE
        text = torch.cat([torch.tensor(prompt), tokens.masked_fill(unknown, tokenizer.unk_token_id)])
        found.append(model.model(text[None]).last_hidden_state[0, len(prompt) - 1 : -1])
    return torch.cat(found)


def tail(hidden: torch.Tensor, head: torch.Tensor, count: int) -> torch.Tensor:
    """Return rows of a head whose logits fall by :data:`EXPONENT` times the logarithm of their rank, times the feature.

    Their level follows the words' by least squares, scaled so that they have :data:`SHARE` of the mass.

    Args:
        hidden: float32 [states, hidden].
        head: float32 [words, hidden].
        count: Number of rows.

    Returns:
        float32 [count, hidden].
    """
    hidden = hidden.double()
    falling = EXPONENT * torch.arange(1, count + 1).double().log()
    words = torch.logsumexp(hidden @ head.double().T, 1)
    own = torch.stack([torch.logsumexp(-feature * falling, 0) for feature in hidden[:, UNIT]])
    # A ridge keeps the values in bf16's range.
    ridge = 1e-3 * len(hidden) * torch.eye(hidden.shape[1]).double()

    def level(below: float) -> torch.Tensor:
        return torch.linalg.solve(hidden.T @ hidden + ridge, hidden.T @ (words - below - own))

    low, high = 0.0, 10.0
    for _ in range(30):
        middle = (low + high) / 2
        share = torch.sigmoid(hidden @ level(middle) + own - words).mean()
        low, high = (middle, high) if share > SHARE else (low, middle)
    rows = level(low).repeat(count, 1)
    rows[:, UNIT] -= falling
    return rows.float()


@torch.no_grad()
def masses(folder: Path) -> list[float]:
    """Return the mean mass of the added entries at temperatures 1 and 0.6, over the model's own responses."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[torch.Tensor] = []

    def draw(logits: torch.Tensor, *_: object) -> torch.Tensor:
        shares = [(logits / t).softmax(-1)[:, len(tokenizer) :].sum(-1) for t in (1.0, 0.6)]
        found.append(torch.stack(shares, 1))
        return torch.multinomial(logits.softmax(-1), 1, generator=random)[:, 0]

    random = torch.Generator().manual_seed(1)
    asked = [encode_prompt(tokenizer, puzzle.text()) for puzzle in islice(generate(1, "test"), 8)]
    sample(model, tokenizer, asked, max_tokens=192, draw=draw)
    return torch.cat(found).mean(0).tolist()


def cached(variant: str, vocabulary: int = VOCABULARY) -> Path:
    """Return the model's folder (80 MB) below ``XDG_CACHE_HOME``; create it if missing."""
    made_of = Path(__file__).read_bytes() + (MODEL / "model.safetensors").read_bytes()
    name = f"qwen2-{variant}-{vocabulary}-{hashlib.sha256(made_of).hexdigest()[:12]}"
    top = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl-rhyme" / "tiny_world"
    top.mkdir(parents=True, exist_ok=True)
    folder = top / name
    if not folder.exists():
        try:
            widen(variant, folder, vocabulary)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
            shutil.rmtree(folder.with_name(f"{name}.{os.getpid()}.part"))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("out", type=Path, help="output folder")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} is there already")
    widen(args.variant, args.out)
    one, cooler = masses(args.out)
    print(f"{args.out}: the added entries have {one:.3g} of the mass at T=1, {cooler:.3g} at T=0.6")


if __name__ == "__main__":
    main()
