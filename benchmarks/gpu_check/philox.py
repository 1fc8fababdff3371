"""Reference of the kernel's noise in torch's integers on any device, without numba.

An independent copy of :mod:`verl_rhyme.sampling.noise`: Philox4x32-10 (Salmon et al., SC 2011).
"""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def words(keys: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return int64 [N, vocabulary] below 2**32, of int64 keys and positions [N]."""
    counter = torch.arange(-(-vocabulary // 4), device=keys.device).expand(len(keys), -1)
    zero = torch.zeros_like(counter)
    c0, c1, c2, c3 = counter, zero + (positions & _LOW)[:, None], zero + (positions >> 32 & _LOW)[:, None], zero
    k0, k1 = (keys & _LOW)[:, None], (keys >> 32 & _LOW)[:, None]
    for _ in range(10):
        (h0, l0), (h1, l1) = _product(c0, 0xD2511F53), _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return torch.stack((c0, c1, c2, c3), dim=-1).flatten(1)[:, :vocabulary]


def _product(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the high and low 32 bits of a product of 32-bit numbers; torch's int64 would overflow in one step."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = (low >> 16) + high  # below 2**49
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Return float64 standard Gumbel noise of the words."""
    return -torch.log(-torch.log1p(-(words.double() + 0.5) * 2.0**-32))
