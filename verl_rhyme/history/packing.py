"""Bit packing of integers at the width of the largest: 18 bits for the ids of a vocabulary of 152,064.

Value i starts at bit ``i * width`` of an array of little-endian 32-bit words, lowest bit first. One extra word ends the
array, so that reading needs no bounds check.

Every numba function here is self-contained: numba's disk cache does not notice a change in another file.
"""

from __future__ import annotations

import numpy as np

from verl_rhyme.compiled import compiled


def width_of(most: int) -> int:
    """Return the bits per value for values from 0 to ``most``, 1 to 32."""
    return max(1, int(most).bit_length())


def words(count: int, width: int) -> int:
    """Return the 32-bit words of ``count`` values."""
    return (count * width + 31) // 32 + 1


def pack(values: np.ndarray, width: int) -> np.ndarray:
    """Pack int32[n], read as uint32 below ``2**width``, into uint32[words]."""
    return _pack(np.ascontiguousarray(values).view(np.uint32), width, words(len(values), width))


def warm() -> None:
    """Compile all functions here, or load them from numba's disk cache, so that no request waits."""
    unpack(pack(np.zeros(1, np.int32), 1), 1, 1, 0)


@compiled
def _pack(values, width, length):
    packed = np.zeros(length, dtype=np.uint32)
    held = np.uint64(0)
    bits = 0
    at = 0
    for i in range(len(values)):
        held |= np.uint64(values[i]) << np.uint64(bits)
        bits += width
        if bits >= 32:
            packed[at] = np.uint32(held & np.uint64(0xFFFFFFFF))
            at += 1
            held >>= np.uint64(32)
            bits -= 32
    packed[at] = np.uint32(held)
    return packed


@compiled
def unpack(packed, count, width, shift=0):
    """Return the values that :func:`pack` packed, plus ``shift``, int32[count].

    ``packed`` is writeable and aligned: numba would recompile for others.
    """
    values = np.empty(count, dtype=np.int32)
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    for i in range(count):
        bit = np.uint64(i) * np.uint64(width)
        word = bit >> np.uint64(5)
        both = np.uint64(packed[word]) | (np.uint64(packed[word + np.uint64(1)]) << np.uint64(32))
        values[i] = np.int32(np.int64((both >> (bit & np.uint64(31))) & mask) + shift)
    return values
