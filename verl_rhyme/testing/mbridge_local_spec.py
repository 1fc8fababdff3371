"""Build mbridge's models from megatron-core layers: Transformer Engine layers need a GPU."""

from __future__ import annotations

from typing import Any

from verl_rhyme.patches.conditions import megatron_runs_on_cpu
from verl_rhyme.patches.core import Patch, around


def _local_spec(original: Any, self: Any, vp_stage: int | None = None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    self.has_vp_stage = True  # read by the caller: megatron-core takes the argument
    return get_gpt_decoder_block_spec(self.config, use_transformer_engine=False, vp_stage=vp_stage)


PATCH = Patch(
    name="mbridge_local_spec",
    target="mbridge.core.llm_bridge:LLMBridge._get_transformer_layer_spec",
    why="Megatron training on a CPU fails: mbridge uses Transformer Engine layers instead of megatron-core layers",
    requires="mbridge==0.15.1",
    source_sha256="e36beb23731fe9675274cc612a25f6e502dfbef247bf4065d5cfed5743aa1a9f",
    replace=around(_local_spec),
    needed=megatron_runs_on_cpu,
)
