"""CUDA graph settings for steps whose rows hold different numbers of tokens.

With speculation, vLLM's full graphs serve only steps where every row drafted the same, longest number of tokens, and
capture sizes are rounded up to multiples of that number plus one (33, 66, ...). With the patch
``vllm_undrafted_graphs`` full graphs serve steps without drafts; ragged steps run in piecewise graphs, which depend
only on the sum of tokens. vLLM stops at 512 tokens, which a wide batch with drafts exceeds.
"""

from __future__ import annotations

import json
from typing import Any

#: Average tokens that a row of a wide batch verifies in a step; largest step worth a graph, beyond which the work hides
#: the launch cost.
TOKENS_PER_ROW, LARGEST = 4, 2048

#: vLLM's options for capture sizes, also as keys of ``compilation_config``.
SIZES = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


def capture_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> list[int]:
    """Return the step sizes (tokens, ascending) to capture graphs for: vLLM's sizes up to 512, then every 64."""
    top = max(1, min(TOKENS_PER_ROW * max_num_seqs, max_num_batched_tokens, LARGEST))
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, LARGEST + 1, 64), top}
    return sorted(size for size in sizes if size <= top)


def settings(chosen: Any, sizes_chosen: bool, max_num_seqs: int, max_num_batched_tokens: int) -> dict[str, Any]:
    """Return the ``compilation_config`` of an engine that drafts; it keeps all keys of the user's, ``chosen``.

    ``sizes_chosen``: the user set the capture sizes elsewhere (``rollout.cudagraph_capture_sizes``, ``engine_kwargs``).
    """
    config = dict(json.loads(chosen) if isinstance(chosen, str) else chosen or {})
    config.setdefault("cudagraph_mode", "FULL_AND_PIECEWISE")
    if not sizes_chosen and not config.keys() & set(SIZES):
        config["cudagraph_capture_sizes"] = capture_sizes(max_num_seqs, max_num_batched_tokens)
    return config
