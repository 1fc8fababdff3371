"""Hard bounds of a draft: vLLM's own limits, the response's budget, the model's length, the memory of the logits.

Every draft token is one more row of logits, and that is all that grows with drafts: one pass over the rows draws and
verifies (:mod:`verl_rhyme.engine.sampler`).
"""

from __future__ import annotations

import numpy as np
from numba import njit

from verl_rhyme.config import MAX_DRAFT_TOKENS


def logits_row_bytes(vocab: int, itemsize: int, ranks: int = 1) -> int:
    """Bytes of one row of logits on a GPU at the fullest moment.

    Over several tensor-parallel ranks vLLM holds the rank's part, the gathered parts and, put in order, the whole.

    Args:
        vocab: Vocabulary size.
        itemsize: Bytes of a logit, in the model's dtype.
        ranks: Tensor-parallel ranks.
    """
    whole = vocab * itemsize
    return whole if ranks == 1 else 2 * whole + -(-whole // ranks)


def profiled_bytes(vocab: int, itemsize: int, slots: int) -> int:
    """Bytes around the logits that vLLM's profile run has seen at least, with speculation configured.

    It verifies one draft token for each of ``slots`` (``max_num_seqs``) requests (``_dummy_sampler_run`` in
    vllm/v1/worker/gpu_model_runner.py): two rows of logits and two float32 tables (targets, probabilities) a request.
    """
    return slots * vocab * (2 * itemsize + 8)


def logits_budget(vocab: int, rows: int, slots: int, memory: int, itemsize: int = 2, ranks: int = 1) -> int:
    """Most draft tokens of a batch whose logits take no more than ``memory`` beyond :func:`profiled_bytes`.

    Args:
        vocab: Vocabulary size.
        rows: Rows of the batch, drafted or not.
        slots: ``max_num_seqs``.
        memory: Bytes.
        itemsize, ranks: See :func:`logits_row_bytes`.
    """
    fitting = (memory + profiled_bytes(vocab, itemsize, slots)) // logits_row_bytes(vocab, itemsize, ranks)
    return max(0, fitting - rows)


def step_budget(step_tokens: int, rows: int, prompts_wait: bool) -> int:
    """Most draft tokens that leave a step's other tokens their place.

    vLLM's scheduler gives a step's tokens to requests in the order in which they run, drafts included: what is too
    much cuts the last drafts off, leaves the last requests without a token, and keeps prompts from being prefilled for
    as long as it lasts.

    Args:
        step_tokens: The scheduler's tokens of a step.
        rows: Rows of the batch.
        prompts_wait: Prompts may be waiting to be prefilled: half of the tokens are theirs.
    """
    room = max(0, step_tokens - rows)
    return room // 2 if prompts_wait else room


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
