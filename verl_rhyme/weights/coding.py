"""Lossless coding of a weight chunk for a slow link: plain, compressed, or as the difference from an older version.

A training step changes few bf16 numbers, and mostly their last bits. The exclusive or of two versions, as 16-bit
words, is therefore nearly all zeros. If few words changed, the code lists the gaps between their positions and the
changed bits. Else it holds all words. High and low bytes of words have little in common: they are split into two
*planes*. zstandard (RFC 8878) compresses the result. Figures: docs/results.md.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Words = NDArray[np.uint16]

#: zstandard's lowest usual level: higher levels take longer and gain next to nothing here.
_LEVEL = 1
#: Gaps are faster and smaller if at most this share of the words changed.
_FEW = 1 / 8
#: Smallest gap that does not fit into one byte; it is stored among the wide gaps, of four bytes each.
_WIDE = 255
#: Header of the gaps: their number, and the number of wide ones.
_HEAD = struct.Struct("<II")


class Form(IntEnum):
    """First byte of a coded chunk: the coding of the remaining bytes."""

    PLAIN = 0
    PACKED = 1
    DELTA = 2
    GAPS = 3


class DamagedError(ValueError):
    """These bytes cannot be decoded into a chunk."""


def encode(data: Bytes, base: Bytes | None = None, pack: bool = True) -> Bytes:
    """Return uint8[M], M at most N + 1: the :class:`Form` byte and the chunk, coded, or plain without ``pack``.

    ``data``, uint8[N], are tensors of any type; bf16 compresses best. ``base``, uint8[N], is the same chunk of a
    version that the receiver has.
    """
    if pack:
        words, tail = _words(data)
        if base is None:
            head, payload = bytes([Form.PACKED]), _planes(words)
        else:
            base_words = _words(base)[0]
            places = np.flatnonzero(words != base_words)
            if len(places) <= _FEW * len(words):
                head, payload = _gaps(places, words[places] ^ base_words[places])
            else:
                head, payload = bytes([Form.DELTA]), _planes(words ^ base_words)
        packed = _codec().compress(np.concatenate([payload, tail]), asbytes=True)
        if len(head) + len(packed) <= len(data):
            return np.frombuffer(head + packed, np.uint8)
    return np.concatenate([np.array([Form.PLAIN], np.uint8), data])


def decode(coded: Bytes, size: int, base: Bytes | None = None) -> Bytes:
    """Return the chunk of ``size`` bytes, uint8[N]; ``base`` is that of :func:`encode`.

    The caller must verify the checksum: damaged input may decode without an error. Raises DamagedError if the bytes are
    not output of :func:`encode`, or need a base that is missing.
    """
    form = int(coded[0]) if len(coded) else -1
    if form == Form.PLAIN:
        if len(coded) != size + 1:
            raise DamagedError(f"received {len(coded) - 1} bytes of a chunk of {size} bytes")
        return coded[1:]
    count = size // 2
    if form == Form.PACKED:
        words, tail = _split(_unpacked(coded[1:], size), count)
    elif base is None or form not in (Form.DELTA, Form.GAPS):
        raise DamagedError(f"a chunk has form {form}, which cannot be decoded here: unknown form, or no base")
    elif form == Form.DELTA:
        words, tail = _split(_unpacked(coded[1:], size), count)
        words ^= _words(base)[0]
    else:
        places, bits, tail = _read_gaps(coded[1:], count, size % 2)
        words = _words(base)[0].copy()
        words[places] ^= bits
    return np.concatenate([words.view(np.uint8), tail])


def _words(data: Bytes) -> tuple[Words, Bytes]:
    even = len(data) // 2 * 2
    return data[:even].view("<u2"), data[even:]


def _planes(words: Words) -> Bytes:
    return np.concatenate([(words >> 8).astype(np.uint8), words.astype(np.uint8)])


def _split(payload: Bytes, count: int) -> tuple[Words, Bytes]:
    """Join two planes into words (the inverse of :func:`_planes`); also return the bytes behind them."""
    return payload[:count].astype("<u2") << np.uint16(8) | payload[count : 2 * count], payload[2 * count :]


def _gaps(places: NDArray[np.intp], bits: Words) -> tuple[bytes, Bytes]:
    gaps = np.diff(places, prepend=0)
    wide = gaps[gaps >= _WIDE].astype("<u4")
    head = bytes([Form.GAPS]) + _HEAD.pack(len(gaps), len(wide))
    return head, np.concatenate([np.minimum(gaps, _WIDE).astype(np.uint8), wide.view(np.uint8), _planes(bits)])


def _read_gaps(coded: Bytes, words: int, odd: int) -> tuple[NDArray[np.int64], Words, Bytes]:
    if len(coded) < _HEAD.size:
        raise DamagedError("a chunk is truncated")
    count, wides = _HEAD.unpack(coded[: _HEAD.size].tobytes())
    if not wides <= count <= words:
        raise DamagedError(f"a chunk of {words} words lists {count} changed words, {wides} of them behind wide gaps")
    payload = _unpacked(coded[_HEAD.size :], 3 * count + 4 * wides + odd)
    gaps = payload[:count].astype(np.int64)
    wide = gaps == _WIDE
    if np.count_nonzero(wide) != wides:
        raise DamagedError("a chunk has another number of wide gaps than its header says")
    gaps[wide] = payload[count : count + 4 * wides].view("<u4")
    places = np.cumsum(gaps)
    if count and places[-1] >= words:
        raise DamagedError("a chunk has changes beyond its end")
    return places, *_split(payload[count + 4 * wides :], count)


def _unpacked(packed: Bytes, size: int) -> Bytes:
    try:
        return np.frombuffer(_codec().decompress(pa.py_buffer(packed), decompressed_size=size), np.uint8)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DamagedError(f"a chunk cannot be decompressed: {error}") from error


def _codec() -> pa.Codec:
    """Return a new codec: it is stateful, and several threads code chunks."""
    return pa.Codec("zstd", compression_level=_LEVEL)
