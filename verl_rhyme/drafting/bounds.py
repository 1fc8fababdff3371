"""Hard bounds of a draft: vLLM's limits, the response's token budget, the model's length, the memory of the logits.

Every draft token adds one row of logits. Nothing else grows with drafts, because one pass over the rows draws and
verifies (:mod:`verl_rhyme.engine.sampler`).
"""

from __future__ import annotations

import numpy as np

from verl_rhyme.config import MAX_DRAFT_TOKENS


def logits_row_bytes(vocab: int, itemsize: int, ranks: int = 1) -> int:
    """Return the peak bytes of one row of logits on a GPU; ``itemsize`` is in the model's dtype.

    With several tensor-parallel ranks vLLM holds the rank's part, the gathered parts, and the reordered row.
    """
    whole = vocab * itemsize
    return whole if ranks == 1 else 2 * whole + -(-whole // ranks)


def profiled_bytes(vocab: int, itemsize: int, slots: int) -> int:
    """Return a lower bound of the bytes of logits and tables in vLLM's profile run with speculation.

    The profile run verifies one draft token for each of ``slots`` (``max_num_seqs``) requests (``_dummy_sampler_run``
    in vllm/v1/worker/gpu_model_runner.py). Each has two rows of logits and two float32 tables (targets, probabilities).
    """
    return slots * vocab * (2 * itemsize + 8)


def logits_budget(vocab: int, rows: int, slots: int, memory: int, itemsize: int = 2, ranks: int = 1) -> int:
    """Return the most draft tokens of a batch of ``rows`` rows.

    Their logits take at most ``memory`` bytes beyond :func:`profiled_bytes`.
    """
    fitting = (memory + profiled_bytes(vocab, itemsize, slots)) // logits_row_bytes(vocab, itemsize, ranks)
    return max(0, fitting - rows)


def step_budget(step_tokens: int, rows: int, prompts_wait: bool) -> int:
    """Return the most draft tokens that leave room for a step's other tokens: half as many if ``prompts_wait``.

    vLLM's scheduler gives a step's tokens to requests in the order in which they run, drafts included. Too many draft
    tokens truncate the last drafts, leave the last requests without a token, and delay the prefill of prompts.
    """
    room = max(0, step_tokens - rows)
    return room // 2 if prompts_wait else room


def request_limits(
    lengths: np.ndarray, generated: np.ndarray, max_tokens: np.ndarray, max_model_len: int, cap: int
) -> np.ndarray:
    """Return the most draft tokens of each request, int64[B]. A draft of K tokens can yield K + 1, which must all fit.

    ``lengths`` are the tokens so far, ``generated`` those of the response, ``max_tokens`` the longest responses, int[B]
    each; ``cap`` is ``drafting.max_tokens``, at most vLLM's 128.
    """
    room = np.minimum(max_tokens.astype(np.int64) - generated, max_model_len - lengths) - 1
    return np.maximum(0, np.minimum(room, min(cap, MAX_DRAFT_TOKENS)))
