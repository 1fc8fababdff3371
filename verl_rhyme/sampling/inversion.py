"""Token sampling by inverting the cumulative distribution: one uniform a row, two reads of the row.

The method is exact (Devroye, *Non-uniform random variate generation*, 1986, section III.2). It is much cheaper than an
exponential for every entry, for draws whose noise need not be reproducible. Rows of a batch do not affect each other.
"""

from __future__ import annotations

import numpy as np

from verl_rhyme.compiled import compiled

#: Entries that are summed in float32 before they are added in float64.
_BLOCK = 1024


def invert(weights: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return the token of each row, int64[N]: the first at which the cumulative weight exceeds ``uniform * total``.

    ``weights`` are float32[N, V], at least 0, proportional to the probabilities, 0 for masked tokens; ``uniforms`` are
    float64[N], inside (0, 1). The token is 0 for a row without weight or with a NaN, else never one of weight 0.
    """
    rows, vocabulary = weights.shape
    whole = vocabulary // _BLOCK
    sums = np.empty((rows, whole + 1))
    # numpy sums pairwise and with vector instructions.
    sums[:, :whole] = weights[:, : whole * _BLOCK].reshape(rows, whole, _BLOCK).sum(axis=2)
    sums[:, whole] = weights[:, whole * _BLOCK :].sum(axis=1)
    return _locate(weights, sums, uniforms)


@compiled
def _locate(weights, sums, uniforms):  # type: ignore[no-untyped-def]
    rows, vocabulary = weights.shape
    out = np.zeros(rows, dtype=np.int64)
    for row in range(rows):
        total = sums[row].sum()
        if not 0.0 < total < np.inf:
            continue
        left = uniforms[row] * total
        block, last = 0, 0
        while sums[row, block] <= left:
            left -= sums[row, block]
            if sums[row, block] > 0.0:
                last = block
            block += 1
            if block == sums.shape[1]:  # rounding left a remainder: take the last token with weight
                block, left = last, np.inf
                break
        for token in range(block * _BLOCK, min((block + 1) * _BLOCK, vocabulary)):
            if weights[row, token] > 0.0:
                out[row] = token
                left -= weights[row, token]
                if left < 0.0:
                    break
    return out


@compiled
def ranks(logits: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Return the rank of each row's token, int64[N]: the entries of float32[N, V] that are at least it; 0 for a NaN."""
    out = np.empty(len(tokens), dtype=np.int64)
    for row in range(len(tokens)):
        least = logits[row, tokens[row]]
        count = np.int32(0)  # as wide as a logit, for vector instructions
        for token in range(logits.shape[1]):
            count += np.int32(logits[row, token] >= least)
        out[row] = count
    return out
