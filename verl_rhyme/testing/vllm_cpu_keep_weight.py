"""Keep vLLM's linear weights on a CPU: the original frees them after packing, so no weight sync can load new ones."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.conditions import vllm_runs_on_cpu
from verl_rhyme.patches.core import Patch, around


def _keep_weight(original: Any, layer: Any, remove_weight: bool) -> None:
    if layer.weight.ndim == 2:
        original(layer, remove_weight=False)
    # Else a causal convolution: with AMX it would be packed, and vllm_cpu_delta_net reads it as it was loaded.


PATCH = Patch(
    name="vllm_cpu_keep_weight",
    # All callers import it by name at call time, so they all get the replacement.
    target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    why="on a CPU the first weight sync fails: vLLM empties linear weights after packing; verl packs them again "
    "after each sync",
    requires="vllm==0.24.0",
    source_sha256="7a8cd246f64d9b0c7513556cb14d6b6b75f17f2ce83d4433a6e5cb917ee0cba9",
    replace=around(_keep_weight),
    needed=vllm_runs_on_cpu,
)
