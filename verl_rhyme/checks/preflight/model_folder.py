"""``config.json`` and weight files of a model, from its folder or the local hub cache; no downloads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

#: Shapes from ``config.json`` of the recipes' models, for dry runs on machines without these models.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-32B": {
        "model_type": "qwen2",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
    "Qwen/Qwen3-8B": {
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}

#: Files of which a tokenizer has at least one.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(path: str) -> bool:
    """Whether ``path`` is a hub repository, ``owner/name``, and not a local folder."""
    return bool(_HUB_ID.fullmatch(path)) and not Path(path).exists()


def find(path: str) -> Path | None:
    """Return the ``config.json`` of ``actor_rollout_ref.model.path``; ``None`` if it is not on this machine."""
    local = Path(path).expanduser() / "config.json"
    if local.is_file():
        return local
    if not is_hub_id(path):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached) if isinstance(cached, str) else None


def has_tokenizer(folder: Path) -> bool:
    own = (*folder.glob("*.tiktoken"), *folder.glob("tokenization_*.py"))
    return bool(own) or any((folder / name).is_file() for name in TOKENIZERS)


def find_missing_weights(folder: Path) -> str:
    """Return a message about missing weight files, empty if none are missing."""
    indices = [*folder.glob("*.safetensors.index.json")] or [*folder.glob("*.bin.index.json")]
    shards = {shard for index in indices for shard in read(index).get("weight_map", {}).values()}
    if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
        verb = "is" if len(missing) == 1 else "are"
        return f"{len(missing)} of {len(shards)} weight files {verb} missing, such as {missing[0]}"
    if not shards and not any((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        return "no weights (*.safetensors or *.bin)"
    return ""


def read(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises:
        ValueError: The file does not contain a JSON object.
    """
    content = json.loads(file.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not contain a JSON object")
    return content
