"""Gated delta nets: resume every decoding request from the state of its last accepted token (vllm-project/vllm#56531).

A step keeps the state after each of its tokens in a slot of its own, and the next step resumes from the slot that the
count of accepted tokens names. vLLM passes the counts for requests with drafts only; others resume from the first slot.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from verl_rhyme.patches.core import Patch, around


def _count_every_decode(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    # None in dummy runs. Drafts of a decoding request are counted already; one token without a draft is none drafted.
    hybrid = self.speculative_config is not None and self.model_config.is_hybrid
    if hybrid and kwargs.get("num_scheduled_tokens") is not None:
        batch, drafted = self.input_batch, self.num_decode_draft_tokens
        rows = batch.num_reqs
        if not kwargs["use_spec_decode"]:
            drafted.np.fill(-1)
        # Also the last token of a prompt, and one that is all of a prompt's first chunk: a step of single tokens is a
        # CUDA graph of such rows. The state of the latter is none, but vLLM leaves that of a new block as it was.
        one = np.diff(self.query_start_loc.np[: rows + 1]) == 1
        first = np.flatnonzero(one & (batch.num_computed_tokens_cpu[:rows] == 0))
        if len(first):
            _clear_states(self, first)
        drafted.np[:rows][one & (drafted.np[:rows] < 0)] = 0
        drafted.copy_to_gpu()
        kwargs["use_spec_decode"] = True
    return original(self, *args, **kwargs)


def _clear_states(runner: Any, rows: np.ndarray) -> None:
    """Set the first slots of these rows, int64[N], to zero in all recurrent layers."""
    from vllm.v1.kv_cache_interface import MambaSpec

    layers = runner.compilation_config.static_forward_context
    for number, group in enumerate(runner.kv_cache_config.kv_cache_groups):
        if isinstance(group.kv_cache_spec, MambaSpec):
            slots = runner.input_batch.block_table[number].get_numpy_array()[rows, 0].tolist()
            for cache in (cache for name in group.layer_names for cache in layers[name].kv_cache):
                cache[slots] = 0


PATCH = Patch(
    name="vllm_gdn_counts",
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata",
    why="after accepted drafts, a gated delta net resumes requests without drafts from a stale state: silently wrong "
    "tokens; fixed in vLLM 0.32",
    requires="vllm==0.24.0",
    source_sha256="0c50682071857c100a8958df311e53210b7a2ad244d023eaa4f03ccc72f04982",
    replace=around(_count_every_decode),
)
