"""Mixtures of experts on a CPU: vLLM packs the experts, so no weight sync can load new ones, or cannot run them."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.conditions import vllm_runs_on_cpu
from verl_rhyme.patches.core import Patch, around


def _plain_experts(_original: Any, self: Any, layer: Any) -> None:
    """Compute one expert after the other with torch, from the weights as they were loaded."""
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.SILU] = _silu_and_mul
    self.isa = "none"
    self.forward_method = self.forward_torch
    self.init_moe_torch(layer=layer)


def _silu_and_mul(x: Any) -> Any:
    """As vLLM's ``SiluAndMul``, whose constructor needs vLLM's config: a forward pass has none."""
    import torch

    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


PATCH = Patch(
    name="vllm_cpu_experts",
    target="vllm.model_executor.layers.fused_moe.cpu_fused_moe:CPUFusedMOE.__init__",
    why="on a CPU a mixture of experts fails in float32 with AMX; without, it keeps its first weights after a sync",
    requires="vllm==0.24.0",
    source_sha256="3fbf2e268aed92ff3a63120b18168d30ebfed0ff5cf4d04005869ccc3f9d16fa",
    replace=around(_plain_experts),
    needed=vllm_runs_on_cpu,
)
