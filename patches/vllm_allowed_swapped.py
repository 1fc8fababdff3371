"""Swap the masks of allowed tokens of two rows: vLLM gives both rows the second one's.

It swaps views of a tensor as if they were values. Rows are swapped where an attention backend separates prompts, and
rows with drafts, from rows of one token.
"""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.core import Patch, around


def _swap_values(original: Any, self: Any, i1: int, i2: int) -> None:
    masks = self.allowed_token_ids_mask_cpu_tensor
    first = None if masks is None else masks[i1].clone()
    original(self, i1, i2)
    if first is not None:
        masks[i2] = first


PATCH = Patch(
    name="vllm_allowed_swapped",
    target="vllm.v1.worker.gpu_input_batch:InputBatch.swap_states",
    why="a request without allowed_token_ids draws from those of another one, whose row was swapped with its own",
    requires="vllm==0.24.0",
    source_sha256="1e5efaeef3cdde3589d118ceb897da08e00f3bd1d3b9299a5e15d8112a0e539f",
    replace=around(_swap_values),
)
