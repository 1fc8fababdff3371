"""What is recorded: one trajectory, and all that is kept of one prompt.

A prompt's value in the store is a header and arrays, little-endian::

    magic "RHY3" | crc32 of all that follows it | n | m | bits of a token, of a suffix (a byte each), two bytes of 0
    bounds int32[m+1] | reward float32[m] | visit, policy_version, sample, step int32[m] each
    tokens + 1, packed[n] | suffixes, packed[n-m-1] | confidence uint8[n]

Tokens and suffixes are packed at the bits that the largest of each needs (:mod:`~verl_rhyme.history.packing`): of a
vocabulary of 152,064 in half a million tokens 18 and 19, so that a token takes 5.6 bytes. Nothing is unpickled.
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
    """Bytes of the value of a prompt with so many responses, of so many tokens together, the greatest id ``most``."""
    n = tokens + responses + 1
    return _size(n, responses, packing.width_of(most + 1), packing.width_of(n - 1))


def version_of(value: bytes | memoryview | np.ndarray) -> bytes:
    """What tells a prompt's value from an earlier or later one: its header, with checksum and sizes; empty of none."""
    return bytes(value[: _HEADER.size])


def _size(n: int, m: int, token_bits: int, suffix_bits: int) -> int:
    packed = packing.words(n, token_bits) + packing.words(n - m - 1, suffix_bits)
    return _HEADER.size + 4 * (m + 1) + 20 * m + 4 * packed + n


def confidence_codes(logprobs: np.ndarray | None, length: int) -> np.ndarray:
    """Probabilities of sampled tokens in a byte each.

    Args:
        logprobs: float[length], natural logarithms, or ``None`` where they are not known.
        length: Tokens.

    Returns:
        uint8[length]: ``128 + 16 * logit`` within 1 to 255; 0 where nothing is known.
    """
    if logprobs is None:
        return np.zeros(length, dtype=np.uint8)
    if len(logprobs) != length:
        raise ValueError(f"{len(logprobs)} log-probabilities for {length} tokens")
    p = np.clip(np.exp(np.asarray(logprobs, dtype=np.float64)), 1e-4, 1 - 1e-4)
    codes = np.clip(np.rint(128 + 16 * np.log(p / (1 - p))), 1, 255)
    return np.where(np.isfinite(p), codes, 0).astype(np.uint8)


class CorruptRecord(ValueError):
    """A prompt's stored value is not what was written."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished response.

    Attributes:
        key: The prompt's key, 16 bytes; see :func:`verl_rhyme.history.keys.prompt_key`.
        tokens: int32[length], the response's token ids.
        reward: Its scalar reward (the sum over tokens where rewards are per token).
        policy_version: Version of the weights that ended it.
        epoch: Pass over the data set it was made in.
        sample: Its number within the group of its prompt.
        logprobs: float32[length], of the tokens under the policy that sampled them; ``None`` where they are not known.
        visit: Label of the prompt's visit, at least 0: the same for all samples of a group, however many parts and
            steps record them. -1: the epoch, for prompts that come once in each.
    """

    key: bytes
    tokens: np.ndarray
    reward: float
    policy_version: int
    epoch: int
    sample: int
    logprobs: np.ndarray | None = None
    visit: int = -1

    def __post_init__(self) -> None:
        if self.visit < 0:
            object.__setattr__(self, "visit", self.epoch)


@dataclass(frozen=True)
class PromptHistory:
    """Everything kept of one prompt: m responses, oldest first, and their suffix array.

    Treat the arrays as read-only: they are shared. (They are left writeable because numba takes several times longer to
    accept a read-only argument.)

    Attributes:
        tokens: int32[n], ``[-1, r0..., -1, r1..., -1]``; see :mod:`verl_rhyme.history.suffix_index`.
        bounds: int32[m + 1], positions of the separators; response i is ``tokens[bounds[i] + 1 : bounds[i + 1]]``.
        suffixes: int32[n - m - 1], the suffix array of the reversed text.
        reward: float32[m].
        visit, policy_version, sample, step: int32[m]; visit is a label that a visit's responses share
            (:attr:`Trajectory.visit`), step the trainer's step that recorded the response.
        confidence: uint8[n], how probable each token was when it was sampled; see :func:`confidence_codes`.
    """

    tokens: np.ndarray
    bounds: np.ndarray
    suffixes: np.ndarray
    reward: np.ndarray
    visit: np.ndarray
    policy_version: np.ndarray
    sample: np.ndarray
    step: np.ndarray
    confidence: np.ndarray

    @classmethod
    def build(cls, trajectories: Sequence[Trajectory], step: int = 0) -> PromptHistory:
        """Index the responses of one prompt, oldest first, all recorded at ``step``."""
        return cls._build(
            [t.tokens for t in trajectories],
            [t.reward for t in trajectories],
            [[t.visit, t.policy_version, t.sample, step] for t in trajectories],
            [confidence_codes(t.logprobs, len(t.tokens)) for t in trajectories],
        )

    @classmethod
    def _build(
        cls,
        responses: Sequence[np.ndarray],
        reward: Sequence[float],
        labels: Sequence,
        codes: Sequence[np.ndarray],
        indexed: int = 0,
        suffixes: np.ndarray | None = None,
    ) -> PromptHistory:
        """``suffixes`` is the suffix array of the first ``indexed`` responses."""
        tokens, bounds = suffix_index.join(responses)
        columns = np.ascontiguousarray(np.array(labels, dtype=np.int32).reshape(len(responses), 4).T)
        confidence = np.zeros(len(tokens), dtype=np.uint8)
        for code, start, end in zip(codes, bounds[:-1], bounds[1:], strict=True):
            confidence[start + 1 : end] = code
        rewards = np.array(reward, dtype=np.float32)
        visit, version, sample, step = columns
        suffixes = suffix_index.build(tokens, int(bounds[indexed]), suffixes)
        return cls(tokens, bounds, suffixes, rewards, visit, version, sample, step, confidence)

    @cached_property
    def first_tokens(self) -> np.ndarray:
        """int32[2**k, 3]; see :func:`verl_rhyme.history.suffix_index.first_tokens`. Not stored: made when asked for."""
        return suffix_index.first_tokens(self.tokens)

    def __len__(self) -> int:
        """Responses kept."""
        return len(self.reward)

    def response(self, i: int) -> np.ndarray:
        """Tokens of response ``i``, int32."""
        return self.tokens[self._span(i)]

    def _span(self, i: int) -> slice:
        return slice(self.bounds[i] + 1, self.bounds[i + 1])

    @property
    def lengths(self) -> np.ndarray:
        """int32[m]: tokens of each response."""
        return np.diff(self.bounds) - 1

    @cached_property
    def scaled_reward(self) -> np.ndarray:
        """float32[m]: rewards scaled to [0, 1] over this prompt's history; all 0 where they do not differ.

        A reward that is not finite counts as the least.
        """
        finite = np.isfinite(self.reward)
        scaled = np.zeros(len(self.reward), dtype=np.float32)
        if finite.any():
            low, high = float(self.reward[finite].min()), float(self.reward[finite].max())
            if high > low:
                scaled[finite] = (self.reward[finite].astype(np.float64) - low) / (high - low)
        return scaled

    def extended(self, trajectories: Sequence[Trajectory], step: int, epochs: int) -> PromptHistory:
        """This history with a step's trajectories added and old visits dropped.

        A sample that the same step recorded before is replaced: a step that is recorded again counts once, and groups
        of one prompt that a step records in several appends add up. A visit's age is when it was last recorded.

        Args:
            trajectories: Of this prompt.
            step: The trainer's step.
            epochs: How many of the latest visits stay (``history.epochs``).
        """
        again = {(t.visit, t.sample) for t in trajectories}
        labels = zip(self.step.tolist(), self.visit.tolist(), self.sample.tolist(), strict=True)
        old = [i for i, (at, *sample) in enumerate(labels) if at != step or tuple(sample) not in again]
        arrived = [int(self.visit[i]) for i in old] + [t.visit for t in trajectories]
        latest = set(list(dict.fromkeys(reversed(arrived)))[:epochs])
        old = [i for i in old if int(self.visit[i]) in latest]
        new = [t for t in trajectories if t.visit in latest]
        return self._build(
            [self.response(i) for i in old] + [t.tokens for t in new],
            [self.reward[i] for i in old] + [t.reward for t in new],
            [[getattr(self, name)[i] for name in _PER_RESPONSE] for i in old]
            + [[t.visit, t.policy_version, t.sample, step] for t in new],
            [self.confidence[self._span(i)] for i in old] + [confidence_codes(t.logprobs, len(t.tokens)) for t in new],
            len(old),
            self._suffixes_of(old),
        )

    def _suffixes_of(self, responses: Sequence[int]) -> np.ndarray:
        """Suffix array of some of the responses, in their order here, as a text of their own."""
        if len(responses) == len(self):
            return self.suffixes
        spans: list[list[int]] = []  # of positions that stay and move as far
        end = 0
        for i in responses:
            start, stop = int(self.bounds[i]), int(self.bounds[i + 1])
            if spans and spans[-1][1] == start:
                spans[-1][1] = stop
            else:
                spans.append([start, stop, start - end])
            end += stop - start
        return suffix_index.without(self.suffixes, np.array(spans, dtype=np.int32).reshape(-1, 3))

    def latest(self, epochs: int) -> PromptHistory:
        """This history without all but its latest visits."""
        return self.extended((), step=-1, epochs=epochs)

    def encode(self) -> bytes:
        """The prompt's value in the store."""
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
        """Tokens and suffixes unpacked, the rest as views over ``value``, or over one copy of it where it is neither a
        bytearray nor an array of bytes.

        Raises:
            CorruptRecord: The value is cut off, altered, or of another format.
        """
        value = memoryview(value if isinstance(value, bytearray | np.ndarray) else bytearray(value))  # type: ignore[arg-type]
        if value[:4] != _MAGIC or len(value) < _HEADER.size:
            raise CorruptRecord(f"not a prompt's history ({len(value)} bytes, begins with {bytes(value[:4])!r})")
        _, checksum, n, m, token_bits, suffix_bits = _HEADER.unpack_from(value)
        expected = _size(n, m, token_bits, suffix_bits)
        if n < m + 1 or len(value) != expected:
            raise CorruptRecord(f"{len(value)} bytes where the header asks for {expected}")
        if zlib.crc32(value[8:]) != checksum:
            raise CorruptRecord("the checksum does not agree")
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
        return cls(tokens, bounds, suffixes, reward, visit, version, sample, step, take("<u1", n))
