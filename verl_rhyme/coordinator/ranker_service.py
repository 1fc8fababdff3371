"""The length ranker of a run: a process of low priority that scores new prompts. No process waits for it: prompts that
start before their score count as unknown."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class RankerActor:
    """A Ray actor that sends its scores to the coordinator. ``folder`` is a ranker of ``verl-rhyme ranker train``;
    ``template`` are the options of the policy's chat template (``data.apply_chat_template_kwargs``)."""

    def __init__(self, folder: str, tokenizer: Any, template: Mapping[str, Any]) -> None:
        import torch
        from transformers.utils import logging as bars

        from verl_rhyme.lengths import ranker

        torch.set_num_threads(1)
        bars.disable_progress_bar()  # else bars of checkpoint loading appear in the run's log
        os.nice(19)
        self._ranker = ranker.load(Path(folder).expanduser())
        self._tokenizer, self._template = tokenizer, template
        self._scored: set[str] = set()

    def score(self, prompts: Mapping[str, Any], coordinator: Any) -> None:
        """Score prompts, as messages by key, that were not scored before."""
        new = {key: self._encode(messages) for key, messages in prompts.items() if key not in self._scored}
        new = {key: ids for key, ids in new.items() if len(ids)}
        if new:
            self._scored |= new.keys()
            expected = self._ranker.expected(list(new.values())).tolist()
            coordinator.rank.remote(dict(zip(new, expected, strict=True)))

    def _encode(self, messages: Any) -> np.ndarray:
        ids = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **self._template
        )
        return np.asarray(ids, dtype=np.int32)


def unusable(folder: str, vocabulary: int | None) -> str:
    """Return why a folder cannot serve as ``lengths.ranker``, and how to fix it; empty if it can. ``vocabulary`` is the
    number of token ids of the policy's tokenizer, if known."""
    path = Path(folder).expanduser()
    if not (path / "ranker.json").is_file() or not any(path.glob("*.safetensors")):
        return (
            f"lengths.ranker={folder} has no ranker: make one with `verl-rhyme ranker train RUN --out {folder}`, on a "
            "run with events.responses=true, or set null"
        )
    try:
        known = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        return f"lengths.ranker={folder} has a config.json that cannot be read ({error}): copy the ranker again"
    embedded = int(known.get("vocab_size") or (known.get("text_config") or {}).get("vocab_size") or 0)
    if vocabulary and 1 << 15 < embedded < vocabulary:  # small rankers fold larger ids on purpose
        return (
            f"lengths.ranker={folder} has {embedded} token ids, the policy's tokenizer {vocabulary}: train it from a "
            "model of the policy's family"
        )
    return ""
