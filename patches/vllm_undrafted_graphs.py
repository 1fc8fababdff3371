"""Capture full CUDA graphs for one token per row: vLLM captures rows with the longest draft only, drafts here vary."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.core import Patch, around


def _capture_undrafted_steps(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    # Both attributes are read only after this call. A "uniform decode" becomes a step of one token per row, as
    # without speculation; larger steps use piecewise graphs. Capture sizes are not rounded up to multiples then.
    if "drafting" in (self.vllm_config.additional_config or {}).get("rhyme", {}):
        self.uniform_decode_query_len = self.cudagraph_dispatcher.uniform_decode_query_len = 1
    original(self, *args, **kwargs)


PATCH = Patch(
    name="vllm_undrafted_graphs",
    target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._check_and_update_cudagraph_mode",
    why="vLLM would capture full CUDA graphs for one draft length only, and pad every step to multiples of it",
    requires="vllm==0.24.0",
    source_sha256="4e5d2d418c432126092a0b010819e020ffaa064a53d8f4826e4f6801360a19ea",
    replace=around(_capture_undrafted_steps),
)
