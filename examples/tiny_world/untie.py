"""Copy a small model with a separate output embedding, as in the 8B and larger Qwens and LLaMAs.

    python -m examples.tiny_world.untie MODEL OUT

Some code needs untied models: mbridge's value models, and its pipelines for LLaMA.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def untie(model: Path, out: Path) -> None:
    """Write the untied model with its tokenizer; ``out`` appears only when complete."""
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
