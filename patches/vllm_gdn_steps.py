"""Gated delta nets: use the counts of accepted tokens in steps without any draft, too (vllm-project/vllm#56531)."""

from verl_rhyme.patches.core import Patch, edited

PATCH = Patch(
    name="vllm_gdn_steps",
    target="vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build",
    why="in a step without drafts, a gated delta net resumes all requests from their first slot, which is stale after "
    "accepted drafts: silently wrong tokens; fixed in vLLM 0.32",
    requires="vllm==0.24.0",
    source_sha256="21ffd16422cec1276114a677f3918601f0087383be348110ccd957c07c4b2d99",
    # requests that have counts, instead of requests that have drafts
    replace=edited(("            .sum()\n            .item()\n", "            .numel()\n\n")),
)
