"""Token sampling per device.

A GPU uses one Triton kernel (:mod:`verl_rhyme.engine.draw_kernel`). A CPU works on a few rows at a time: it uses keyed
noise where the noise must be reproducible. Elsewhere it inverts the cumulative distribution, with one uniform a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from verl_rhyme.sampling import inversion, noise


@dataclass(frozen=True)
class Rows:
    """Sampling inputs of some rows of logits, one row for each token to be drawn."""

    request: np.ndarray  # int64[N], row of the batch
    keys: np.ndarray  # uint64[N], noise keys
    positions: np.ndarray  # int64[N], position of the token in its sequence
    temperatures: np.ndarray  # float32[N], 0 for greedy rows
    keyed: np.ndarray  # bool[N], whether another draw with the same key and position must use the same noise

    def __len__(self) -> int:
        return len(self.request)

    def part(self, at: slice | np.ndarray) -> Rows:
        return Rows(self.request[at], self.keys[at], self.positions[at], self.temperatures[at], self.keyed[at])


def draw_on_gpu(logits: torch.Tensor, rows: Rows, scaled: bool, raw: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, int64[N], and their log-probabilities, float32[N], before the temperature if ``raw``.

    ``logits`` are float[N, V], already divided by the temperature if ``scaled``.
    """
    from verl_rhyme.engine import draw_kernel  # Triton is not installed everywhere

    temperatures = np.sign(rows.temperatures) if scaled else rows.temperatures
    # Packed into three columns of eight bytes, so that one transfer is enough.
    packed = np.stack([rows.keys.view(np.int64), rows.positions, temperatures.astype(np.float64).view(np.int64)])
    keys, positions, bits = torch.from_numpy(packed).pin_memory().to(logits.device, non_blocking=True)
    return draw_kernel.draw(logits, keys, positions, bits.view(torch.float64).float(), raw)


def draw_on_cpu(
    logits: torch.Tensor, rows: Rows, scratch: torch.Tensor, want_logprobs: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return tokens of a few rows, int64[N], and their log-probabilities, float32[N].

    ``logits`` are float32[N, V], contiguous, divided by the temperature; ``scratch`` has at least N * V entries.
    """
    greedy = rows.temperatures == 0
    keyed = rows.keyed & ~greedy
    fresh = ~(greedy | keyed)
    weights = None
    if want_logprobs or fresh.any():
        weights = torch.softmax(logits, dim=-1, out=scratch[: logits.numel()].view(logits.shape))
    tokens = np.empty(len(rows), dtype=np.int64)
    if greedy.any():
        tokens[greedy] = logits[torch.from_numpy(greedy)].argmax(dim=-1).numpy()
    if keyed.any():
        some = logits[torch.from_numpy(keyed)]
        tokens[keyed] = noise.draw(some.numpy(), rows.keys[keyed], rows.positions[keyed])
    if weights is not None and fresh.any():
        some = weights if fresh.all() else weights[torch.from_numpy(fresh)]
        tokens[fresh] = inversion.invert(some.numpy(), noise.uniforms(rows.keys[fresh], rows.positions[fresh]))
    drawn = torch.from_numpy(tokens)
    if weights is None or not want_logprobs:
        return drawn, None
    return drawn, weights.gather(1, drawn[:, None])[:, 0].log()


def ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the ranks, int[N], of tokens, int64[N]: entries of each row, float[N, V], that are at least it."""
    if logits.device.type == "cpu":
        return torch.from_numpy(inversion.ranks(logits.numpy(), tokens.numpy()))
    from verl_rhyme.engine import draw_kernel

    return draw_kernel.ranks(logits, tokens)
