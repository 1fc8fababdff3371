"""Records of the history: one trajectory, and the history of one prompt.

A prompt's value in the store is a header and arrays, little-endian::

    magic "RHY3" | crc32 of the rest | n | m | bits per token, bits per suffix (a byte each), two bytes of 0
    bounds int32[m+1] | reward float32[m] | visit, policy_version, sample, step int32[m] each
    tokens + 1, packed[n] | suffixes, packed[n-m-1] | confidence uint8[n]

Tokens and suffixes are packed at the width of the largest value (:mod:`~verl_rhyme.history.packing`). With a vocabulary
of 152,064 and half a million tokens these are 18 and 19 bits, or 5.6 bytes per token. Decoding unpickles nothing.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from verl_rhyme.history import packing, suffix_index

_MAGIC, _HEADER = b"RHY3", struct.Struct("<4sIIIBBxx")
_PER_RESPONSE = ("visit", "policy_version", "sample", "step")


def encoded_bytes(tokens: int, responses: int, most: int) -> int:
    """Return the bytes of a prompt's value, by the tokens of all responses and the largest token id."""
    n = tokens + responses + 1
    return _size(n, responses, packing.width_of(most + 1), packing.width_of(n - 1))


def version_of(value: bytes | memoryview | np.ndarray) -> bytes:
    """Return the version of a prompt's value: its header, with a checksum; empty for an empty value."""
    return bytes(value[: _HEADER.size])


def _size(n: int, m: int, token_bits: int, suffix_bits: int) -> int:
    packed = packing.words(n, token_bits) + packing.words(n - m - 1, suffix_bits)
    return _HEADER.size + 4 * (m + 1) + 20 * m + 4 * packed + n


def confidence_codes(logprobs: np.ndarray | None, length: int) -> np.ndarray:
    """Encode the probabilities of sampled tokens, uint8[length]: ``128 + 16 * logit`` in 1 to 255; 0 if unknown."""
    if logprobs is None:
        return np.zeros(length, dtype=np.uint8)
    p = np.clip(np.exp(np.asarray(logprobs, dtype=np.float64)), 1e-4, 1 - 1e-4)
    codes = np.clip(np.rint(128 + 16 * np.log(p / (1 - p))), 1, 255)
    return np.where(np.isfinite(p), codes, 0).astype(np.uint8)


class CorruptRecord(ValueError):
    """A prompt's stored value is damaged."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished response: the policy's tokens, those of later turns directly after those of earlier ones."""

    key: bytes  # prompt key, 16 bytes
    tokens: np.ndarray  # int32[length]
    reward: float  # sum of token rewards
    policy_version: int  # that finished the response
    epoch: int  # pass over the data set
    sample: int  # number in the group of its prompt
    logprobs: np.ndarray | None = None  # float32[length], under the policy that sampled each token
    #: Label of the visit, the same for all samples of a group, in all parts and steps. -1: the epoch.
    visit: int = -1

    def __post_init__(self) -> None:
        if self.visit < 0:
            object.__setattr__(self, "visit", self.epoch)


@dataclass(frozen=True)
class PromptHistory:
    """History of one prompt: m responses, oldest first, and their suffix array.

    Treat the arrays as read-only; they are writeable because numba takes several times longer to accept others.
    """

    tokens: np.ndarray  # int32[n], [-1, r0..., -1, r1..., -1]; see suffix_index
    bounds: np.ndarray  # int32[m + 1], separators: response i is tokens[bounds[i] + 1 : bounds[i + 1]]
    suffixes: np.ndarray  # int32[n - m - 1], suffix array of the reversed text
    reward: np.ndarray  # float32[m]
    visit: np.ndarray  # int32[m], Trajectory.visit
    policy_version: np.ndarray  # int32[m]
    sample: np.ndarray  # int32[m]
    step: np.ndarray  # int32[m], training step that recorded the response
    confidence: np.ndarray  # uint8[n], confidence_codes of the tokens

    @classmethod
    def build(cls, trajectories: Sequence[Trajectory], step: int = 0) -> PromptHistory:
        """Index the responses of one prompt, oldest first, recorded at ``step``."""
        tokens, bounds = suffix_index.join([])
        none, confidence = np.zeros(0, dtype=np.int32), np.zeros(1, dtype=np.uint8)
        empty = cls(tokens, bounds, none, none.astype(np.float32), none, none, none, none, confidence)
        return empty.extended(trajectories, step, epochs=len(trajectories))

    @cached_property
    def first_tokens(self) -> np.ndarray:
        return suffix_index.first_tokens(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in vars(self).values())

    def __len__(self) -> int:
        return len(self.reward)

    def response(self, i: int) -> np.ndarray:
        return self.tokens[self._span(i)]

    def _span(self, i: int) -> slice:
        return slice(self.bounds[i] + 1, self.bounds[i + 1])

    @property
    def lengths(self) -> np.ndarray:
        """int32[m], tokens of each response."""
        return np.diff(self.bounds) - 1

    @cached_property
    def scaled_reward(self) -> np.ndarray:
        """float32[m], rewards scaled to [0, 1]; all 0 if they are equal. One that is not finite is the lowest."""
        finite = np.isfinite(self.reward)
        scaled = np.zeros(len(self.reward), dtype=np.float32)
        if finite.any():
            low, high = float(self.reward[finite].min()), float(self.reward[finite].max())
            if high > low:
                scaled[finite] = (self.reward[finite].astype(np.float64) - low) / (high - low)
        return scaled

    def extended(self, trajectories: Sequence[Trajectory], step: int, epochs: int) -> PromptHistory:
        """Return this history with a step's trajectories and the latest ``epochs`` visits, by their last recording.

        A sample that the same step recorded before is replaced, so that a repeated step counts once.
        """
        again = {(t.visit, t.sample) for t in trajectories}
        labels = zip(self.step.tolist(), self.visit.tolist(), self.sample.tolist(), strict=True)
        old = [i for i, (at, *sample) in enumerate(labels) if at != step or tuple(sample) not in again]
        arrived = [int(self.visit[i]) for i in old] + [t.visit for t in trajectories]
        latest = set(list(dict.fromkeys(reversed(arrived)))[:epochs])
        old = [i for i in old if int(self.visit[i]) in latest]
        new = [t for t in trajectories if t.visit in latest]
        tokens, bounds = suffix_index.join([self.response(i) for i in old] + [t.tokens for t in new])
        suffixes = suffix_index.build(tokens, int(bounds[len(old)]), self._suffixes_of(old))
        reward = np.array([self.reward[i] for i in old] + [t.reward for t in new], dtype=np.float32)
        rows = [[getattr(self, name)[i] for name in _PER_RESPONSE] for i in old]
        rows += [[t.visit, t.policy_version, t.sample, step] for t in new]
        columns = np.ascontiguousarray(np.array(rows, dtype=np.int32).reshape(-1, len(_PER_RESPONSE)).T)
        confidence = np.zeros(len(tokens), dtype=np.uint8)
        codes = [self.confidence[self._span(i)] for i in old] + [
            confidence_codes(t.logprobs, len(t.tokens)) for t in new
        ]
        for code, start, end in zip(codes, bounds[:-1], bounds[1:], strict=True):
            confidence[start + 1 : end] = code
        named = dict(zip(_PER_RESPONSE, columns, strict=True))
        return PromptHistory(tokens, bounds, suffixes, reward, **named, confidence=confidence)

    def _suffixes_of(self, responses: Sequence[int]) -> np.ndarray:
        """Return the suffix array of a text of some of the responses, in their order here."""
        if len(responses) == len(self):
            return self.suffixes
        spans: list[list[int]] = []  # start, stop and shift of the positions that stay
        end = 0
        for i in responses:
            start, stop = int(self.bounds[i]), int(self.bounds[i + 1])
            if spans and spans[-1][1] == start:
                spans[-1][1] = stop
            else:
                spans.append([start, stop, start - end])
            end += stop - start
        return suffix_index.drop_responses(self.suffixes, np.array(spans, dtype=np.int32).reshape(-1, 3))

    def latest(self, epochs: int) -> PromptHistory:
        return self.extended((), step=-1, epochs=epochs)

    def encode(self) -> bytes:
        n = len(self.tokens)
        token_bits, suffix_bits = packing.width_of(int(self.tokens.max()) + 1), packing.width_of(n - 1)
        tokens = packing.pack(self.tokens + np.int32(1), token_bits)
        labels = [getattr(self, name) for name in _PER_RESPONSE]
        arrays = [self.bounds, self.reward, *labels, tokens, packing.pack(self.suffixes, suffix_bits), self.confidence]
        body: list[Any] = [struct.pack("<IIBBxx", n, len(self), token_bits, suffix_bits), *arrays]
        checksum = 0
        for part in body:
            checksum = zlib.crc32(part, checksum)
        return b"".join([_MAGIC, struct.pack("<I", checksum), *body])

    @classmethod
    def decode(cls, value: bytes | bytearray | memoryview | np.ndarray) -> PromptHistory:
        """Decode a value, or raise CorruptRecord. No array is a view, which would keep the value in memory."""
        value = memoryview(value if isinstance(value, bytearray | np.ndarray) else bytearray(value))  # type: ignore[arg-type]
        if value[:4] != _MAGIC or len(value) < _HEADER.size:
            raise CorruptRecord(f"not a prompt's history ({len(value)} bytes, starts with {bytes(value[:4])!r})")
        _, checksum, n, m, token_bits, suffix_bits = _HEADER.unpack_from(value)
        expected = _size(n, m, token_bits, suffix_bits)
        if n < m + 1 or len(value) != expected:
            raise CorruptRecord(f"{len(value)} bytes, but the header requires {expected}")
        if zlib.crc32(value[8:]) != checksum:
            raise CorruptRecord("the checksum does not match")
        offset = _HEADER.size

        def take(dtype: str, count: int) -> np.ndarray:
            nonlocal offset
            array = np.frombuffer(value, dtype=dtype, count=count, offset=offset)
            offset += array.nbytes
            return array

        def packed(count: int, width: int, shift: int) -> np.ndarray:
            return packing.unpack(take("<u4", packing.words(count, width)), count, width, shift)

        bounds, reward = take("<i4", m + 1), take("<f4", m)
        visit, version, sample, step = (take("<i4", m) for _ in _PER_RESPONSE)
        tokens, suffixes = packed(n, token_bits, -1), packed(n - m - 1, suffix_bits, 0)
        columns = [each.copy() for each in (reward, visit, version, sample, step, take("<u1", n))]
        return cls(tokens, bounds.copy(), suffixes, *columns)
