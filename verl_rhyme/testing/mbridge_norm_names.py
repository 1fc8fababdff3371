"""Map separate norm weights: mbridge knows only Transformer Engine norms, fused into the next linear layer."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.conditions import megatron_runs_on_cpu
from verl_rhyme.patches.core import Patch, around

#: megatron-core's local layers keep each norm separate.
_FUSED = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}


def _fused_names(original: Any, self: Any, mcore_weights_name: str) -> list[str]:
    for separate, fused in _FUSED.items():
        if "pre_mlp" in separate and self.config.num_moe_experts:
            continue  # mbridge has it separate before experts
        mcore_weights_name = mcore_weights_name.replace(separate, fused)
    return original(self, mcore_weights_name)


PATCH = Patch(
    name="mbridge_norm_names",
    target="mbridge.core.bridge:Bridge._weight_name_mapping_mcore_to_hf",
    why="Megatron training on a CPU can neither load nor export the norm weights",
    requires="mbridge==0.15.1",
    source_sha256="194b182083144de15586fffa45a7edfa2925dfc7581c70abd7cbde61d935dd1b",
    replace=around(_fused_names),
    needed=megatron_runs_on_cpu,
)
