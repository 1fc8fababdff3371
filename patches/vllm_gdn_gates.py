"""Gated delta nets: take the gates of drafted requests in their own order (vllm-project/vllm#51812)."""

from verl_rhyme.patches.core import Patch, edited

_BEFORE = """                    a=a,
                    b=b,
                    dt_bias=self.dt_bias,
                    q=query_spec,
"""
_AFTER = """                    a=a if mixed_qkv_non_spec is None else a.index_select(0, spec_token_indx),
                    b=b if mixed_qkv_non_spec is None else b.index_select(0, spec_token_indx),
                    dt_bias=self.dt_bias,
                    q=query_spec,
"""

PATCH = Patch(
    name="vllm_gdn_gates",
    target="vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._forward_core",
    why="in a step with drafts and prompts, a gated delta net uses the gates of other tokens for drafted requests: "
    "silently wrong tokens; fixed in later releases of vLLM",
    requires="vllm==0.24.0",
    source_sha256="e44ca3c7263815592ddb04b8813d9487f07717cb90e9cd9229be9ec2758141f8",
    replace=edited((_BEFORE, _AFTER)),
)
