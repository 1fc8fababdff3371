"""How a chunk of weights crosses a slow link: as it is, packed, or as what differs from an older version.

All are lossless. An update changes few bf16 numbers, and these in their last bits. So the exclusive or of two versions,
as 16-bit words, is nearly all zeros: where few words changed, their places go as gaps from one to the next, with the
bits that changed; else all words. High and low bytes of words, which have little in common, are put apart (two
*planes*), and zstandard (RFC 8878) packs what came of it. Measured: docs/studies/weights.md.
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

#: zstandard's lowest usual level: higher ones take longer and gain next to nothing here.
_LEVEL = 1
#: Gaps are faster and smaller where at most this share of the words changed.
_FEW = 1 / 8
#: A gap in a byte; one of so many words or more stands among the wide ones, of four bytes.
_WIDE = 255
#: Before the gaps: how many, and how many of them are wide.
_HEAD = struct.Struct("<II")


class Form(IntEnum):
    """First byte of a coded chunk: what the others are."""

    PLAIN = 0
    PACKED = 1
    DELTA = 2
    GAPS = 3


class DamagedError(ValueError):
    """No chunk can be made of these bytes."""


def encode(data: Bytes, base: Bytes | None = None, pack: bool = True) -> Bytes:
    """A chunk as it is sent.

    Args:
        data: uint8[N], of tensors of any type; what gains most is bf16.
        base: uint8[N], the same chunk of a version that the receiver has; ``None``: of none.
        pack: Else it goes as it is.

    Returns:
        uint8[M], M at most N + 1: a byte that tells the :class:`Form`, and the chunk in it.
    """
    if pack:
        words, tail = _words(data)
        if base is None:
            head, payload = bytes([Form.PACKED]), _planes(words)
        else:
            old = _words(base)[0]
            places = np.flatnonzero(words != old)
            if len(places) <= _FEW * len(words):
                head, payload = _gaps(places, words[places] ^ old[places])
            else:
                head, payload = bytes([Form.DELTA]), _planes(words ^ old)
        packed = _codec().compress(np.concatenate([payload, tail]), asbytes=True)
        if len(head) + len(packed) <= len(data):
            return np.frombuffer(head + packed, np.uint8)
    return np.concatenate([np.array([Form.PLAIN], np.uint8), data])


def decode(coded: Bytes, size: int, base: Bytes | None = None) -> Bytes:
    """A chunk from what was sent.

    Args:
        coded: uint8[M], of :func:`encode`.
        size: N, bytes of the chunk.
        base: uint8[N], as :func:`encode` had it, where that may have used one.

    Returns:
        uint8[N]. It is not known to be right before its checksum says so.

    Raises:
        DamagedError: The bytes are not what :func:`encode` made, or need a base that is not here.
    """
    form = int(coded[0]) if len(coded) else -1
    if form == Form.PLAIN:
        if len(coded) != size + 1:
            raise DamagedError(f"{len(coded) - 1} bytes came of a chunk of {size}")
        return coded[1:]
    count = size // 2
    if form == Form.PACKED:
        words, tail = _split(_unpacked(coded[1:], size), count)
    elif base is None or form not in (Form.DELTA, Form.GAPS):
        raise DamagedError(f"a chunk came in form {form}, which cannot be read here")
    elif form == Form.DELTA:
        words, tail = _split(_unpacked(coded[1:], size), count)
        words ^= _words(base)[0]
    else:
        places, bits, tail = _read_gaps(coded[1:], count, size % 2)
        words = _words(base)[0].copy()
        words[places] ^= bits
    return np.concatenate([words.view(np.uint8), tail])


def differs(coded: Bytes) -> bool:
    """Whether it is what differs from another version, rather than all bytes."""
    return int(coded[0]) in (Form.DELTA, Form.GAPS)


def _words(data: Bytes) -> tuple[Words, Bytes]:
    """And the last byte of an odd number."""
    even = len(data) // 2 * 2
    return data[:even].view("<u2"), data[even:]


def _planes(words: Words) -> Bytes:
    return np.concatenate([(words >> 8).astype(np.uint8), words.astype(np.uint8)])


def _split(payload: Bytes, count: int) -> tuple[Words, Bytes]:
    """What :func:`_planes` was given, and what stands behind it."""
    return payload[:count].astype("<u2") << np.uint16(8) | payload[count : 2 * count], payload[2 * count :]


def _gaps(places: NDArray[np.intp], bits: Words) -> tuple[bytes, Bytes]:
    gaps = np.diff(places, prepend=0)
    wide = gaps[gaps >= _WIDE].astype("<u4")
    head = bytes([Form.GAPS]) + _HEAD.pack(len(gaps), len(wide))
    return head, np.concatenate([np.minimum(gaps, _WIDE).astype(np.uint8), wide.view(np.uint8), _planes(bits)])


def _read_gaps(coded: Bytes, words: int, odd: int) -> tuple[NDArray[np.int64], Words, Bytes]:
    if len(coded) < _HEAD.size:
        raise DamagedError("a chunk was cut short")
    count, wides = _HEAD.unpack(coded[: _HEAD.size].tobytes())
    if not wides <= count <= words:
        raise DamagedError(f"a chunk of {words} words came with {count} that changed")
    payload = _unpacked(coded[_HEAD.size :], 3 * count + 4 * wides + odd)
    gaps = payload[:count].astype(np.int64)
    wide = gaps == _WIDE
    if np.count_nonzero(wide) != wides:
        raise DamagedError("a chunk came with other gaps than it tells")
    gaps[wide] = payload[count : count + 4 * wides].view("<u4")
    places = np.cumsum(gaps)
    if count and places[-1] >= words:
        raise DamagedError("a chunk came with changes behind its end")
    return places, *_split(payload[count + 4 * wides :], count)


def _unpacked(packed: Bytes, size: int) -> Bytes:
    try:
        return np.frombuffer(_codec().decompress(pa.py_buffer(packed), decompressed_size=size), np.uint8)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DamagedError(f"a chunk cannot be unpacked: {error}") from error


def _codec() -> pa.Codec:
    """One for each call: it holds a state, and chunks are coded in several threads."""
    return pa.Codec("zstd", compression_level=_LEVEL)
