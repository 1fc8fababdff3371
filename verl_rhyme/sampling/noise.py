"""Counter-based noise: a request's token is a function of its key, the position and the distribution.

Tokens are drawn as ``argmax_v logits[v] + g[v]`` with standard Gumbel noise g, which is a draw from ``softmax(logits)``
(Gumbel, 1954; Maddison et al., 2014, arXiv:1411.0030). The noise is Philox4x32-10 (Salmon et al., *Parallel random
numbers: as easy as 1, 2, 3*, SC 2011) of (key; vocabulary block, position). It has no state: another draw of the same
position of the same request, in any batch and after any interruption, uses the same noise. Two policies draw the same
token with a probability of at least (1 - TV) / (1 + TV), TV their total variation distance (Daliri et al., 2024,
arXiv:2408.07978). The noise of a trained sample is spent: the new weights depend on it.
One inverted uniform a row is cheaper on a CPU, but moves several times as many tokens under newer weights.

A uniform has 32 bits, u = (w + 1/2) 2**-32, and the output distribution is exact up to that resolution: tokens with a
probability below 1e-10 may never be drawn. Draws that need not be reproduced use one uniform of 53 bits for each row
(:func:`uniforms`), which is inverted (:mod:`verl_rhyme.sampling.inversion`).
"""

from __future__ import annotations

import hashlib

import numpy as np

from verl_rhyme.compiled import compiled

#: Philox4x32's multipliers and the increments of its keys (Weyl sequences), and its number of rounds.
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 10
#: Vocabulary entries of one Philox block of four 32-bit words.
BLOCK = 4

_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)
_UNIT = 2.0**-32
#: Entries that are processed together.
_SPAN = 64 * BLOCK
_SIGN, _HALF, _SIXTY_FOURTH, _ONE = np.uint32(1 << 31), 2.0**31 + 0.5, 1 / 64, 1 + 1e-9


def key_of(*parts: int | str) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        kind, data = b"s" if isinstance(part, str) else b"i", str(part).encode()
        digest.update(kind + len(data).to_bytes(8, "little") + data)
    return int.from_bytes(digest.digest(), "little")


@compiled
def philox(c0, c1, c2, c3, k0, k1):  # type: ignore[no-untyped-def]
    """Return four Philox4x32-10 words of a counter (four words) and a key (two words); all uint64 below 2**32."""
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


@compiled
def _block(key, position, block):  # type: ignore[no-untyped-def]
    position = np.uint64(position)
    return philox(np.uint64(block), position & _LOW, position >> _32, np.uint64(0), key & _LOW, key >> _32)


@compiled
def words(keys: np.ndarray, positions: np.ndarray, vocabulary: int) -> np.ndarray:
    """Return the random bits of all vocabulary entries, uint32[N, V], by key (uint64[N]) and position (int64[N])."""
    out = np.empty((len(keys), vocabulary), dtype=np.uint32)
    for row in range(len(keys)):
        for first in range(0, vocabulary, BLOCK):
            four = _block(keys[row], positions[row], first // BLOCK)
            for i in range(min(BLOCK, vocabulary - first)):
                out[row, first + i] = four[i]
    return out


@compiled
def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return float64[N] inside (0, 1), by key (uint64[N]) and position (int64[N]).

    The Philox block lies beyond any vocabulary.
    """
    out = np.empty(len(keys))
    for row in range(len(keys)):
        high, low, _, _ = _block(keys[row], positions[row], _LOW)
        out[row] = ((high << np.uint64(21) | low >> np.uint64(11)) + 0.5) * 2.0**-53
    return out


def gumbel(words: np.ndarray) -> np.ndarray:
    """Return float64 Gumbel noise ``-log(E)`` with the exponential ``E = -log1p(-u)``, precise for small E."""
    return -np.log(-np.log1p(-(words + 0.5) * _UNIT))


@compiled
def _fill(key, position, first, w0, w1, w2, w3):  # type: ignore[no-untyped-def]
    """Fill the words (uint32) of the Philox blocks from ``first`` on; :func:`philox` in vector instructions."""
    position = np.uint64(position)
    k0, k1 = key & _LOW, key >> _32
    for i in range(len(w0)):
        w0[i], w1[i] = np.uint32(first + i), np.uint32(position & _LOW)
        w2[i], w3[i] = np.uint32(position >> _32), np.uint32(0)
    for _ in range(_ROUNDS):
        low, high = np.uint32(k0), np.uint32(k1)
        for i in range(len(w0)):
            p0, p1 = np.uint64(w0[i]) * _M0, np.uint64(w2[i]) * _M1
            w0[i], w1[i] = np.uint32(p1 >> _32) ^ w1[i] ^ low, np.uint32(p1)
            w2[i], w3[i] = np.uint32(p0 >> _32) ^ w3[i] ^ high, np.uint32(p0)
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW


@compiled
def _may_exceed(logit, word, best):  # type: ignore[no-untyped-def]
    """Return 1 if the entry could exceed ``best``, else 0; never 0 for the winner."""
    u = (np.float64(np.int32(word ^ _SIGN)) + _HALF) * _UNIT  # vector instructions convert signed words only
    # To win, E < exp(-d). E > u, and exp(d) > (1 + d/64)**64.
    power = max(1 + (best - np.float64(logit)) * _SIXTY_FOURTH, 0.0)
    for _ in range(6):
        power *= power
    return np.int32(u * power < _ONE)


@compiled
def _count_hopeful(logits, row, first, w, blocks, best):  # type: ignore[no-untyped-def]
    """Return how many entries of ``blocks`` Philox blocks, from entry ``first`` on, could exceed ``best``."""
    hopeful = np.int32(0)
    for i in range(blocks):
        at = first + BLOCK * i
        hopeful += _may_exceed(logits[row, at], w[0, i], best)
        hopeful += _may_exceed(logits[row, at + 1], w[1, i], best)
        hopeful += _may_exceed(logits[row, at + 2], w[2, i], best)
        hopeful += _may_exceed(logits[row, at + 3], w[3, i], best)
    return hopeful


@compiled
def draw(logits: np.ndarray, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the token of each row, int64[N]: ``argmax(logits + gumbel(words(...)))``; 0 for a fully masked row.

    ``logits`` are float32[N, V], divided by the temperature, -inf for masked tokens; ``keys`` uint64[N]; ``positions``
    int64[N], of the drawn tokens in their sequences.
    """
    out = np.zeros(len(logits), dtype=np.int64)
    vocabulary = logits.shape[1]
    w = np.empty((BLOCK, _SPAN // BLOCK), dtype=np.uint32)
    for row in range(len(logits)):
        likeliest, top = 0, np.float32(-np.inf)
        for token in range(vocabulary):
            if logits[row, token] > top:
                likeliest, top = token, logits[row, token]
        out[row] = likeliest
        if top == -np.inf:
            continue
        # The likeliest entry goes first, so that most others can be skipped.
        four = _block(keys[row], positions[row], likeliest // BLOCK)
        best = top - np.log(-np.log1p(-(four[likeliest % BLOCK] + 0.5) * _UNIT))
        for first in range(0, vocabulary, _SPAN):
            blocks = min(_SPAN, vocabulary - first) // BLOCK
            _fill(keys[row], positions[row], first // BLOCK, w[0, :], w[1, :], w[2, :], w[3, :])
            end = min(first + _SPAN, vocabulary)
            if first + BLOCK * blocks == end and not _count_hopeful(logits, row, first, w, blocks, best):
                continue
            for token in range(first, end):
                word = w[token % BLOCK, (token - first) // BLOCK]
                if not _may_exceed(logits[row, token], word, best):
                    continue
                u = (word + 0.5) * _UNIT
                score = logits[row, token] - np.log(-np.log1p(-u))
                if score > best:
                    best, out[row] = score, token
    return out
