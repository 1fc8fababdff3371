"""Make a tiny Qwen3.5: three gated delta nets and one attention layer, with another tiny model's tokenizer.

    python -m examples.tiny_world.hybrid MODEL OUT [TRACES]

TRACES (0): solver traces that it is trained on; without, its weights are random. vLLM and verl know Qwen3.5 with its
vision tower only, which is one layer here.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def make(model: Path, out: Path, traces: int = 0, seed: int = 0) -> None:
    """Write the hybrid; ``out`` appears only when complete."""
    import torch
    from transformers import AutoTokenizer, Qwen3_5Config, Qwen3_5ForConditionalGeneration

    from .train import save, train

    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    images = [len(tokenizer) - number for number in (1, 2, 3, 4)]  # reserved words
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 1,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 1024,
        "initializer_range": 0.05,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        **ends,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 1, "out_hidden_size": 128}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    torch.manual_seed(seed)
    config = Qwen3_5Config(text_config=text, vision_config=vision, **dict(zip(names, images, strict=True)))
    hybrid = Qwen3_5ForConditionalGeneration(config)
    if traces:
        hybrid.config.pad_token_id, hybrid.config.vocab_size = tokenizer.pad_token_id, len(tokenizer)
        train(hybrid, tokenizer, traces, 2e-3, seed)
    save(hybrid, tokenizer, part)
    part.rename(out)


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: python -m examples.tiny_world.hybrid MODEL OUT [TRACES]")
    make(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
