"""Make a tiny Qwen3 with eight experts, two a token, with another tiny model's tokenizer.

    python -m examples.tiny_world.mixture MODEL OUT [TRACES]

TRACES (1000): solver traces that it is trained on, half a minute; some of its answers are then right.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def make(model: Path, out: Path, traces: int = 1000, seed: int = 0) -> None:
    """Write the mixture; ``out`` appears only when complete."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from .train import look_back, save, train

    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.05,
        **ends,
    )
    mixture = Qwen3MoeForCausalLM(config)
    look_back(mixture)
    if traces:
        train(mixture, tokenizer, traces, 2e-3, seed)
    save(mixture, tokenizer, part)
    part.rename(out)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python -m examples.tiny_world.mixture MODEL OUT [TRACES]")
    make(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
