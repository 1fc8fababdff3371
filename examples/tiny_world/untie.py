"""A copy of a small model whose output embedding is a tensor of its own, as the 8B and larger Qwens and LLaMAs have it.

    python -m examples.tiny_world.untie MODEL OUT

Some of what works for those does not for tied ones: mbridge's value models, and its pipelines for LLaMA.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def untie(model: Path, out: Path) -> None:
    """Write the same model, untied, with its tokenizer; ``out`` appears when it is whole."""
    import torch
    from transformers import AutoModelForCausalLM

    part = out.with_name(f"{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(model, part)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    loaded.config.tie_word_embeddings = False
    loaded.lm_head.weight = torch.nn.Parameter(loaded.get_input_embeddings().weight.detach().clone())
    loaded.save_pretrained(part)
    part.rename(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m examples.tiny_world.untie MODEL OUT")
    untie(Path(sys.argv[1]), Path(sys.argv[2]))
