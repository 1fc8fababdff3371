"""Tokenizer and weight files of a model folder."""

from __future__ import annotations

from pathlib import Path

from verl_rhyme.planning.architecture import read_json

#: Files of which a tokenizer has at least one.
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def has_tokenizer(folder: Path) -> bool:
    own = (*folder.glob("*.tiktoken"), *folder.glob("tokenization_*.py"))
    return bool(own) or any((folder / name).is_file() for name in TOKENIZERS)


def find_missing_weights(folder: Path) -> str:
    indices = [*folder.glob("*.safetensors.index.json")] or [*folder.glob("*.bin.index.json")]
    shards = {shard for index in indices for shard in read_json(index).get("weight_map", {}).values()}
    if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
        verb = "is" if len(missing) == 1 else "are"
        return f"{len(missing)} of {len(shards)} weight files {verb} missing, such as {missing[0]}"
    if not shards and not any((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
        return "no weights (*.safetensors or *.bin)"
    return ""
