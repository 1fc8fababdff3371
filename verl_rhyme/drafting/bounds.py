"""Hard bounds of a draft: vLLM's limits, the response's token budget, the model's length, the memory of the logits.

Every draft token adds one row of logits. Nothing else grows with drafts, because one pass over the rows draws and
verifies (:mod:`verl_rhyme.engine.sampler`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from verl_rhyme.config import MAX_DRAFT_TOKENS
from verl_rhyme.drafting.recurrent import MAX_TOKENS


def engine_tokens(wanted: int, *, recurrent: bool, adapters: bool, slots: int, step_tokens: int) -> int:
    """Return the most draft tokens that an engine gives a request in a step; 0: it cannot draft.

    ``wanted``: ``drafting.max_tokens``. ``recurrent``: whether the model has recurrent layers. With LoRA ``adapters``
    vLLM 0.24 starts only if that many tokens of each of ``slots`` (``max_num_seqs``) requests fit into a step of
    ``step_tokens`` (``max_num_batched_tokens``; ``EngineArgs.create_engine_config``). No step needs it: its tables of
    adapters hold the tokens of a step, drafts among them.
    """
    longest = min(wanted, MAX_TOKENS) if recurrent else wanted
    return max(0, min(longest, step_tokens // slots - 1)) if adapters else longest


def affordable_tokens(longest: int, requests: int, capacity: Callable[[int], float]) -> int:
    """Return the most draft tokens, from 1 to ``longest``, whose states cost no request that the run wants at once.

    ``requests``: those of an engine that the run has at once. ``capacity``: the requests that an engine's cache holds
    at once with so many draft tokens; with 0 of them it may hold fewer than the run wants.
    """
    wanted = min(requests, capacity(0))
    return next((tokens for tokens in range(longest, 1, -1) if capacity(tokens) >= wanted), min(longest, 1))


def logits_budget(vocab: int, rows: int, slots: int, memory: int, itemsize: int = 2, ranks: int = 1) -> int:
    """Return the most draft tokens of a batch of ``rows`` rows; their logits take ``memory`` bytes beyond the profiled.

    vLLM's profile run verifies one draft token for each of ``slots`` (``max_num_seqs``) requests
    (``_dummy_sampler_run`` in vllm/v1/worker/gpu_model_runner.py). Each has two rows of logits, of ``itemsize`` bytes
    an entry, and two float32 tables (targets, probabilities). With several tensor-parallel ranks vLLM holds of each row
    the rank's part, the gathered parts, and the reordered row.
    """
    profiled = slots * vocab * (2 * itemsize + 8)
    row = vocab * itemsize
    peak = row if ranks == 1 else 2 * row + -(-row // ranks)
    return max(0, (memory + profiled) // peak - rows)


def step_budget(step_tokens: int, rows: int, prompts_wait: bool) -> int:
    """Return the most draft tokens that leave room for a step's other tokens: half as many if ``prompts_wait``.

    A synchronous scheduler gives a step's tokens to requests in the order in which they run, drafts included. Too many
    draft tokens truncate the last drafts, leave the last requests without a token, and delay the prefill of prompts. In
    an asynchronous engine prompts come first, and a plan for more tokens than they leave would be dropped.
    """
    room = max(0, step_tokens - rows)
    return room // 2 if prompts_wait else room


def request_limits(
    lengths: np.ndarray, generated: np.ndarray, max_tokens: np.ndarray, max_model_len: int, cap: int
) -> np.ndarray:
    """Return the most draft tokens of each request, int64[B]. A draft of K tokens can yield K + 1, which must all fit.

    A text of ``max_model_len`` tokens ends with a token without a draft: only then an asynchronous scheduler knows that
    no step follows.

    ``lengths`` are the tokens so far, ``generated`` those of the response, ``max_tokens`` the longest responses, int[B]
    each; ``cap`` is ``drafting.max_tokens``, at most vLLM's 128.
    """
    room = np.minimum(max_tokens - generated, max_model_len - 1 - lengths).astype(np.int64) - 1
    return np.maximum(0, np.minimum(room, min(cap, MAX_DRAFT_TOKENS)))
