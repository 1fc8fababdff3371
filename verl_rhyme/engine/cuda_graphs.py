"""CUDA graphs for steps whose rows hold different numbers of tokens.

verl asks vLLM for ``FULL_AND_PIECEWISE``. With speculation vLLM's full graphs are for steps where every row drafted the
same, longest number of tokens, which ragged drafts never do; and for their sake it rounds all capture sizes up to
multiples of that number plus one (33, 66, ...), so that every step would be padded that far. The patch
``vllm_undrafted_graphs`` lets an engine of ours make them for steps without drafts instead: those run as stock vLLM's
do, ragged ones in piecewise graphs, which need the sum of tokens only. vLLM also stops capturing at 512 tokens, which
a wide batch with drafts exceeds: larger steps would run without a graph.
"""

from __future__ import annotations

import json
from typing import Any

#: Tokens that a row is expected to verify in a step, on the average of a wide batch; and a step's size that is worth
#: a graph: beyond it the work hides the cost of launching it.
TOKENS_PER_ROW, LARGEST = 4, 2048

#: vLLM's options that say which sizes there are graphs for, also as keys of ``compilation_config``.
SIZES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


def capture_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Tokens of the steps to capture graphs for, rising: vLLM's own up to 512, then every 64.

    Args:
        max_num_seqs: Rows of the widest batch.
        max_num_batched_tokens: Tokens of the largest step.
    """
    top = max(1, min(TOKENS_PER_ROW * max_num_seqs, max_num_batched_tokens, LARGEST))
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, LARGEST + 1, 64), top}
    return sorted(size for size in sizes if size <= top)


def settings(chosen: Any, sizes_chosen: bool, max_num_seqs: int, max_num_batched_tokens: int) -> dict[str, Any]:
    """``compilation_config`` of an engine that drafts.

    Args:
        chosen: The user's, a mapping or JSON or nothing; each of its keys stays.
        sizes_chosen: The user set the capture sizes elsewhere (``rollout.cudagraph_capture_sizes``, ``engine_kwargs``).
        max_num_seqs, max_num_batched_tokens: See :func:`capture_sizes`.
    """
    config = dict(json.loads(chosen) if isinstance(chosen, str) else chosen or {})
    config.setdefault("cudagraph_mode", "FULL_AND_PIECEWISE")
    if not sizes_chosen and not config.keys() & set(SIZES):
        config["cudagraph_capture_sizes"] = capture_sizes(max_num_seqs, max_num_batched_tokens)
    return config
