"""Hard bounds of a draft: vLLM's own limits, the response's budget, the model's length, the sampler's memory.

The rejection sampler works on float32 tables that vLLM's memory profile does not know of: about
``4 V (2 sum(K) + 3 B (Kmax + 1))`` bytes for a vocabulary of V, B rows in the batch and K draft tokens in each.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from verl_rhyme.config import MAX_DRAFT_TOKENS


def sampler_bytes(vocab: int, rows: int, total: int, kmax: int) -> int:
    """Bytes the rejection sampler takes for ``total`` draft tokens over ``rows`` rows, ``kmax`` in one at most."""
    return 4 * vocab * (2 * total + 3 * rows * (kmax + 1))


def batch_budget(vocab: int, rows: int, kmax: int, memory: int) -> int:
    """Most draft tokens of a whole batch that keep the sampler within ``memory`` bytes.

    Args:
        vocab: Vocabulary size of the logits (padded, as the model emits them).
        rows: Rows of the batch, drafted or not.
        kmax: Longest draft any row may have.
        memory: Bytes.

    Returns:
        Tokens; 0 where not even the rows themselves fit (then :func:`longest_draft` tells which ``kmax`` would).
    """
    return max(0, (memory // (4 * vocab) - 3 * rows * (kmax + 1)) // 2)


def longest_draft(vocab: int, rows: int, memory: int, cap: int) -> int:
    """Largest ``kmax`` up to ``cap`` that leaves :func:`batch_budget` room for at least one draft of that length.

    The memory grows with rows times kmax, so that a wide batch can only have short drafts.
    """
    return max(0, min(cap, (memory // (4 * vocab) - 3 * rows) // (2 + 3 * rows)))


def request_limits(
    lengths: np.ndarray, generated: np.ndarray, max_tokens: np.ndarray, max_model_len: int, cap: int
) -> np.ndarray:
    """Draft tokens each request may have. A draft of K tokens can yield K + 1, and all of them must fit.

    Args:
        lengths: int[B], tokens so far, prompt and response.
        generated: int[B], tokens of the response so far.
        max_tokens: int[B], the response's budget.
        max_model_len: Positions the model has.
        cap: The configured ``drafting.max_tokens``.

    Returns:
        int64[B], each from 0 to ``min(cap, 128)``; 128 is vLLM's own limit.
    """
    columns = (np.asarray(column, dtype=np.int64) for column in (lengths, generated, max_tokens))
    return _request_limits(*columns, max_model_len, min(cap, MAX_DRAFT_TOKENS))


@njit(cache=True, nogil=True)
def _request_limits(lengths, generated, max_tokens, max_model_len, cap):
    limits = np.empty(len(lengths), dtype=np.int64)
    for i in range(len(lengths)):
        room = min(max_tokens[i] - generated[i], max_model_len - lengths[i]) - 1
        limits[i] = max(0, min(room, cap))
    return limits


def share(wanted: np.ndarray, budget: int) -> np.ndarray:
    """Cut wishes down to a budget, as a round robin of one token each would.

    Args:
        wanted: int[B], at least 0.
        budget: Tokens for all.

    Returns:
        int64[B], each at most what was wanted, together ``min(budget, sum(wanted))``; what is left over after equal
        shares goes to the first rows.
    """
    wanted = np.maximum(np.asarray(wanted, dtype=np.int64), 0)
    budget = max(0, int(budget))
    if int(wanted.sum()) <= budget:
        return wanted
    # The level L with sum(min(wanted, L)) <= budget < sum(min(wanted, L + 1)).
    low, high = 0, int(wanted.max())
    while high - low > 1:
        middle = (low + high) // 2
        if int(np.minimum(wanted, middle).sum()) <= budget:
            low = middle
        else:
            high = middle
    granted = np.minimum(wanted, low)
    above = np.flatnonzero(wanted > low)
    granted[above[: budget - int(granted.sum())]] += 1
    return granted
