"""Recurrent layers: keep the count of accepted tokens of a request that sits out a step.

The scheduler leaves a running request out of a step whose token budget is spent. vLLM removes it from the batch, and
adds it again with a count of one.
"""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.core import Patch, around


def _keep_counts(original: Any, self: Any, scheduler_output: Any) -> Any:
    asynchronous = hasattr(self, "rhyme_steps")  # engine.steps keeps them: the copy to the host may be in flight
    if asynchronous or self.speculative_config is None or not self.model_config.is_hybrid:
        return original(self, scheduler_output)
    kept: dict[str, int] = self.__dict__.setdefault("_rhyme_counts", {})
    batch, cached = self.input_batch, scheduler_output.scheduled_cached_reqs
    # Of the last step. Its copy to the host is complete: the host has read the step's tokens.
    kept |= {request: int(batch.num_accepted_tokens_cpu[row]) for request, row in batch.req_id_to_index.items()}
    for request in (*scheduler_output.finished_req_ids, *cached.resumed_req_ids):  # computed from the start
        kept.pop(request, None)
    before = set(batch.req_id_to_index)
    result = original(self, scheduler_output)
    for request, row in batch.req_id_to_index.items():
        if request not in before:
            batch.num_accepted_tokens_cpu[row] = kept.get(request, 1)
    return result


PATCH = Patch(
    name="vllm_kept_counts",
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
    why="with drafts, a recurrent layer resumes a request that sat out a step from a stale state: wrong tokens",
    requires="vllm==0.24.0",
    source_sha256="8384dce2bda3439cedfd765bc75586153b35520a8b69b0af335a74efc8772e17",
    replace=around(_keep_counts),
)
