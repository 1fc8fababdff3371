"""Hidden states of a policy along a recorded trace, as the engine has them when it drafts.

transformers computes them once per trace on the CPU (minutes for the pretrained model). They are cached in
``~/.cache/verl_rhyme/states``.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.traces import Response

_BATCH = 16
_CACHE = Path.home() / ".cache" / "verl_rhyme" / "states"
#: Maximum difference between a recorded log-probability and the policy's, in nats.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class States:
    """Hidden states of a policy along a trace.

    Attributes:
        hidden: float16[n, D] by response: the normalised last hidden state behind each of its n tokens.
        output: float32[V, D], rows of the output layer; logits are ``hidden @ output.T``.
        embedding: float32[V, D], input embeddings; the same array if they are tied.
    """

    hidden: dict[str, np.ndarray]
    output: np.ndarray
    embedding: np.ndarray

    def likeliest(self, id: str) -> np.ndarray:
        """Return int64[n], the policy's most probable token at each position of a response."""
        return np.argmax(self.hidden[id].astype(np.float32) @ self.output.T, axis=1)


def load(steps: Sequence[Sequence[Response]], folder: Path, temperature: float) -> States:
    """Return the states along the responses of ``steps``.

    Args:
        steps: Responses of each training step of the trace, all or the first ones.
        folder: Folder of the policy.
        temperature: Sampling temperature of the trace.

    Raises:
        SystemExit: The policy's log-probabilities differ from the trace's: another policy made the trace.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    output = model.get_output_embeddings().weight.detach()
    embedding = model.get_input_embeddings().weight.detach()
    responses = [r for step in steps for r in step]
    path = _CACHE / f"{_digest(responses, folder, temperature)}.npz"
    if path.exists():
        found = dict(np.load(path))
    else:
        found = {}
        of_prompt: dict[bytes, list[Response]] = {}
        for response in responses:
            of_prompt.setdefault(response.prompt.tobytes(), []).append(response)
        for same in of_prompt.values():
            same.sort(key=lambda r: len(r.tokens))
            prompt = torch.from_numpy(same[0].prompt.astype(np.int64))[None]
            with torch.inference_mode():
                read = model.model(prompt, use_cache=True)
            for begin in range(0, len(same), _BATCH):
                batch = same[begin : begin + _BATCH]
                tokens = [torch.from_numpy(r.tokens.astype(np.int64)) for r in batch]
                with torch.inference_mode():
                    cache = copy.deepcopy(read.past_key_values)
                    cache.batch_repeat_interleave(len(batch))
                    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
                    after = model.model(ids, past_key_values=cache).last_hidden_state
                    before = read.last_hidden_state[:, -1:].expand(len(batch), -1, -1)
                    states = torch.cat([before, after], dim=1)  # the state after the last token predicts none
                    for i, r in enumerate(batch):
                        hidden = states[i, : len(r.tokens)]
                        logprobs = (hidden @ output.T / temperature).log_softmax(-1)
                        recorded = logprobs.gather(1, tokens[i][:, None])[:, 0].numpy()
                        if float(np.abs(recorded - r.logprobs).max()) > _TOLERANCE:
                            raise SystemExit(f"{folder} at temperature {temperature} did not make this trace")
                        found[r.id] = hidden.half().numpy()
        _CACHE.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(part, **found)
        part.rename(path)
    return States(hidden=found, output=output.numpy(), embedding=embedding.numpy())


def _digest(responses: Sequence[Response], folder: Path, temperature: float) -> str:
    digest = hashlib.sha256(f"{folder.resolve()} {(folder / 'config.json').stat().st_mtime_ns} {temperature}".encode())
    for response in responses:
        digest.update(response.id.encode() + response.prompt.tobytes() + response.tokens.tobytes())
    return digest.hexdigest()[:24]
