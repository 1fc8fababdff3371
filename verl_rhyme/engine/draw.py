"""Drawing tokens: the one place that knows how each device does it best.

On a GPU one Triton kernel (:mod:`verl_rhyme.engine.draw_kernel`). Elsewhere a few rows at a time: keyed noise
where it must be met again, inversion of the cumulative distribution where not, which needs no noise for each entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from verl_rhyme.sampling import inversion, noise


@dataclass(frozen=True)
class Rows:
    """What is known of some rows of logits, one for each token to be drawn.

    Attributes:
        request: int64 [N], the row of the batch.
        keys: uint64 [N], of the noise.
        positions: int64 [N], of the token in its sequence.
        temperatures: float32 [N], 0 for greedy rows.
        keyed: bool [N]: another draw of the same key and position must meet the same noise.
    """

    request: np.ndarray
    keys: np.ndarray
    positions: np.ndarray
    temperatures: np.ndarray
    keyed: np.ndarray

    def __len__(self) -> int:
        return len(self.request)

    def part(self, at: slice) -> Rows:
        return Rows(self.request[at], self.keys[at], self.positions[at], self.temperatures[at], self.keyed[at])

    @property
    def divisors(self) -> np.ndarray | None:
        """float32 [N], what the logits are divided by; ``None`` where that is 1 throughout."""
        divisors = np.where(self.temperatures > 0, self.temperatures, np.float32(1))
        return None if (divisors == 1).all() else divisors


def has_kernel(device: torch.device) -> bool:
    return device.type == "cuda"


def by_kernel(logits: torch.Tensor, rows: Rows, scaled: bool, raw: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (int64 [N]) and their log-probabilities (float32 [N]) on a GPU; nothing is copied but what rows are.

    Args:
        logits: float [N, V].
        rows: The same N.
        scaled: They are divided by the temperature already.
        raw: Log-probabilities of the logits before the temperature.
    """
    from verl_rhyme.engine import draw_kernel  # here: Triton is not everywhere

    temperatures = np.sign(rows.temperatures) if scaled else rows.temperatures
    # One transfer for all: three columns of eight bytes.
    packed = np.stack([rows.keys.view(np.int64), rows.positions, temperatures.astype(np.float64).view(np.int64)])
    pinned = torch.from_numpy(packed).pin_memory() if logits.device.type == "cuda" else torch.from_numpy(packed)
    keys, positions, bits = pinned.to(logits.device, non_blocking=True)
    return draw_kernel.draw(logits, keys, positions, bits.view(torch.float64).float(), raw)


def by_inversion(
    logits: torch.Tensor, rows: Rows, scratch: torch.Tensor, want_logprobs: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same on a CPU, for a few rows.

    Args:
        logits: float32 [N, V], contiguous, divided by the temperature.
        rows: The same N.
        scratch: float32, N * V entries at least.
        want_logprobs: Whether log-probabilities are wanted.
    """
    greedy = rows.temperatures == 0
    noisy = rows.keyed & ~greedy
    fresh = ~(greedy | noisy)
    weights = None
    if want_logprobs or fresh.any():
        weights = torch.softmax(logits, dim=-1, out=scratch[: logits.numel()].view(logits.shape))
    if fresh.all():
        assert weights is not None
        tokens = inversion.invert(weights.numpy(), noise.uniforms(rows.keys, rows.positions))
    else:
        tokens = np.empty(len(rows), dtype=np.int64)
        for mask, draw in ((greedy, _greedy), (noisy, _keyed)):
            if mask.any():
                tokens[mask] = draw(logits[torch.from_numpy(mask)], rows, mask)
        if fresh.any():
            assert weights is not None
            chosen = weights.numpy()[fresh]
            tokens[fresh] = inversion.invert(chosen, noise.uniforms(rows.keys[fresh], rows.positions[fresh]))
    found = torch.from_numpy(tokens)
    if not want_logprobs:
        return found, None
    assert weights is not None
    return found, weights.gather(1, found[:, None])[:, 0].log()


def _greedy(logits: torch.Tensor, rows: Rows, mask: np.ndarray) -> np.ndarray:
    return logits.argmax(dim=-1).numpy()


def _keyed(logits: torch.Tensor, rows: Rows, mask: np.ndarray) -> np.ndarray:
    plain = np.zeros(len(logits), dtype=bool)
    return noise.draw(logits.numpy(), rows.keys[mask], rows.positions[mask], plain)
