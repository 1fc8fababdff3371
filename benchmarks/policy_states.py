"""The hidden states of a policy along a recorded trace: what the engine would have at hand when it drafts.

Computed once a trace with transformers on the CPU (two to nine minutes for the pretrained model), and kept in
``~/.cache/verl_rhyme/states``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.traces import Response

_BATCH = 16
_CACHE = Path.home() / ".cache" / "verl_rhyme" / "states"
#: Nats by which a recorded log-probability may differ from the policy's own.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class States:
    """A policy along a trace.

    Attributes:
        hidden: float16[n, D] by response: the last hidden state, normalised, that gave each of its n tokens.
        output: float32[V, D], the output rows; logits are ``hidden @ output.T``.
        embedding: float32[V, D], the input embeddings; the same array where they are tied.
    """

    hidden: dict[str, np.ndarray]
    output: np.ndarray
    embedding: np.ndarray

    def likeliest(self, id: str) -> np.ndarray:
        """int64[n], the policy's likeliest token at every position of a response."""
        return np.argmax(self.hidden[id].astype(np.float32) @ self.output.T, axis=1)


def load(steps: Sequence[Sequence[Response]], folder: Path, temperature: float) -> States:
    """The states along the responses of ``steps``.

    Args:
        steps: Responses of each training step; those of the whole trace, or a beginning.
        folder: The policy's folder.
        temperature: Of the trace.

    Raises:
        SystemExit: The policy gives the trace's tokens other log-probs than the trace says: it is another one.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    output = model.get_output_embeddings().weight.detach()
    embedding = model.get_input_embeddings().weight.detach()
    responses = sorted((r for step in steps for r in step), key=lambda r: len(r.prompt) + len(r.tokens))
    path = _CACHE / f"{_digest(responses, folder, temperature)}.npz"
    if path.exists():
        found = dict(np.load(path))
    else:
        found = {}
        for begin in range(0, len(responses), _BATCH):
            batch = responses[begin : begin + _BATCH]
            texts = [torch.from_numpy(np.concatenate([r.prompt, r.tokens]).astype(np.int64)) for r in batch]
            ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
            with torch.inference_mode():
                states = model.model(ids, attention_mask=mask).last_hidden_state
                for i, r in enumerate(batch):
                    hidden = states[i, len(r.prompt) - 1 :][: len(r.tokens)]
                    logprobs = (hidden @ output.T / temperature).log_softmax(-1)
                    recorded = logprobs.gather(1, texts[i][len(r.prompt) :, None])[:, 0].numpy()
                    if float(np.abs(recorded - r.logprobs).max()) > _TOLERANCE:
                        raise SystemExit(f"{folder} at temperature {temperature} is not the policy of this trace")
                    found[r.id] = hidden.half().numpy()
        _CACHE.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(part, **found)
        part.rename(path)
    return States(hidden=found, output=output.numpy(), embedding=embedding.numpy())


def _digest(responses: Sequence[Response], folder: Path, temperature: float) -> str:
    told = hashlib.sha256(f"{folder.resolve()} {(folder / 'config.json').stat().st_mtime_ns} {temperature}".encode())
    for response in responses:
        told.update(response.id.encode() + response.prompt.tobytes() + response.tokens.tobytes())
    return told.hexdigest()[:24]
