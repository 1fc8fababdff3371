"""Clear the mask of allowed tokens of a row that gets another request: vLLM leaves that of a request that has moved."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.core import Patch, around


def _clear_mask(original: Any, self: Any, request: Any) -> int:
    row = original(self, request)
    if self.allowed_token_ids_mask_cpu_tensor is not None and request.req_id not in self.has_allowed_token_ids:
        self.allowed_token_ids_mask_cpu_tensor[row] = False
    return row


PATCH = Patch(
    name="vllm_allowed_added",
    target="vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
    why="a request without allowed_token_ids draws from those of an earlier request, whose row has moved",
    requires="vllm==0.24.0",
    source_sha256="1623645fc08dada5d5c53080b65841717d88a395437e63edee20f5bc9f3ac2ba",
    replace=around(_clear_mask),
)
