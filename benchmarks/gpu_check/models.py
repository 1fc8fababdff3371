"""Models for a machine without network: Qwen2.5's shapes with random weights.

Times do not depend on the weights. Where draws matter, the output layer is scaled so that logits have a deviation of
:data:`SPREAD`: a few tokens then share most of the probability, as in a trained model. It is never tied to the
embedding, because a random model then repeats its last token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

#: Width, layers, heads, key-value heads, width of the MLP, vocabulary size.
SHAPES: dict[str, tuple[int, int, int, int, int, int]] = {
    "tiny": (64, 2, 2, 1, 128, 1024),
    "0.5B": (896, 24, 14, 2, 4864, 151_936),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936),
    "7B": (3584, 28, 28, 4, 18_944, 152_064),
}
SPREAD = 6.0


def config(size: str) -> Qwen2Config:
    """Return the configuration of a size in :data:`SHAPES`."""
    width, layers, heads, kv_heads, inner, entries = SHAPES[size]
    return Qwen2Config(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=entries,
        tie_word_embeddings=False,
        max_position_embeddings=32_768,
        architectures=["Qwen2ForCausalLM"],
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        dtype="bfloat16",
    )


def described(size: str, folder: Path) -> str:
    """Write a folder with only the configuration, for ``load_format="dummy"``, and return it."""
    config(size).save_pretrained(folder)
    return str(folder)


def made(size: str, at: torch.device) -> Any:
    """Return a model with random weights in bf16 and scaled logits."""
    torch.manual_seed(0)
    with at:
        model = AutoModelForCausalLM.from_config(config(size), dtype=torch.bfloat16).eval()
    return spread(model, 32)


def spread(model: Any, tokens: int) -> Any:
    """Scale the output layer by the logits of the first tokens."""
    with torch.no_grad():
        logits = model(input_ids=torch.arange(tokens, device=model.device)[None]).logits.float()
        model.get_output_embeddings().weight.mul_(SPREAD / logits.std())
    return model


def saved(size: str, folder: Path, at: torch.device) -> str:
    """Write the model of :func:`made` as a folder of weights, and return it."""
    made(size, at).save_pretrained(folder)
    return str(folder)


def delta_net(folder: Path, entries: int) -> str:
    """Write a small Qwen3.5 with random weights and return its folder; three of four layers are gated delta nets.

    vLLM knows Qwen3.5 with its vision tower only. It has no experts, which vLLM runs only on a CPU with AVX-512.
    """
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    torch.manual_seed(7)
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    text = {
        "vocab_size": entries,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,  # the minimum of vLLM's CPU kernel
        "linear_value_head_dim": 128,
        "max_position_embeddings": 4096,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        **ends,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 1, "out_hidden_size": 64}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    images = {name: entries + number for number, name in enumerate(names)}  # never said
    config = Qwen3_5Config(text_config=text, vision_config=vision, **images)
    spread(Qwen3_5ForConditionalGeneration(config).eval(), entries).save_pretrained(folder)
    return str(folder)
