"""Drop verl's 2D padding mask: megatron-core's local attention expects a mask over pairs of positions."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.conditions import megatron_runs_on_cpu
from verl_rhyme.patches.core import Patch, around


def _causal_is_enough(
    original: Any, self: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any
) -> Any:
    if attention_mask is not None and attention_mask.dim() == 2:
        # verl pads on the right, and no real token attends to the right: the causal mask is enough.
        if self.attn_mask_type.name != "causal":
            raise ValueError(f"a padding mask requires causal attention, but the type is {self.attn_mask_type}")
        attention_mask = None
    return original(self, query, key, value, attention_mask, *args, **kwargs)


PATCH = Patch(
    name="megatron_padding_mask",
    target="megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
    why="Megatron training on a CPU fails in attention: megatron-core's local attention rejects verl's padding mask",
    requires="megatron-core==0.16.1",
    source_sha256="6ea34637b381dcc2e7c0acaaa3ff90b057972577ba9fa1fe7da0714aa4c97f06",
    replace=around(_causal_is_enough),
    needed=megatron_runs_on_cpu,
)
