"""Gated delta nets with drafts on a CPU: vLLM's CPU kernel refuses drafts, and needs AMX."""

from __future__ import annotations

from typing import Any, get_type_hints

from verl_rhyme.patches.conditions import vllm_runs_on_cpu
from verl_rhyme.patches.core import Patch


def _with_slots(original: Any) -> Any:
    def cpu_gdn_attention_core(mixed_qkv, b, a, core_attn_out, layer_name):  # type: ignore[no-untyped-def]
        _delta_net(mixed_qkv, b, a, core_attn_out, layer_name)

    # torch reads the schema of the op from them
    cpu_gdn_attention_core.__annotations__ = get_type_hints(original) | {"return": None}
    return cpu_gdn_attention_core


def _delta_net(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
    """One request and one token after the other, in float32, by the slots and counts of vLLM's GPU kernels.

    ``mixed_qkv``: [tokens, 2 * keys + values]. ``b``, ``a``: [tokens, value heads]. ``core_attn_out``: [tokens, value
    heads, dimension]. Source: Yang et al., "Gated Delta Networks", equation 10, with a causal convolution before it.
    """
    import torch
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.utils.torch_utils import _resolve_layer_name

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    batch = context.attn_metadata[layer.prefix]
    windows, states = layer.kv_cache  # [slots, dim, width - 1 + drafts] and [slots, value heads, values, keys]
    if not is_conv_state_dim_first():
        windows = windows.transpose(-1, -2)
    weight = layer.conv1d.weight.flatten(1)  # [dim, width]
    width = weight.shape[1] - 1
    for rows, slots, counts in _requests(batch):
        if not len(rows):
            continue
        window = windows[slots[0], :, counts - 1 : counts - 1 + width]
        state = states[slots[counts - 1]].float()
        if counts == 0:  # the start of a prompt
            window, state = torch.zeros_like(windows[slots[0], :, :width]), torch.zeros_like(state)
        seen = torch.cat([window, mixed_qkv[rows].T.to(window.dtype)], dim=1)
        # With drafts, the window that follows each of the tokens; the next count says which.
        after = seen[:, 1:] if len(slots) > 1 else seen[:, -width:]
        windows[slots[0], :, : after.shape[1]] = after
        mixed = (seen.float().unfold(1, width + 1, 1) * weight.float()[:, None]).sum(-1)  # [dim, tokens]
        if layer.conv1d.bias is not None:
            mixed += layer.conv1d.bias.float()[:, None]
        query, key, value = (x[0] for x in layer.rearrange_mixed_qkv(torch.nn.functional.silu(mixed).T))
        query, key = (_per_value_head(x, value.shape[1]) for x in (query, key))
        decay = -layer.A_log.float().exp() * torch.nn.functional.softplus(a[rows].float() + layer.dt_bias.float())
        beta = b[rows].float().sigmoid()
        for at in range(len(rows)):
            state = state * decay[at].exp()[:, None, None]
            missing = value[at] - torch.einsum("hvk,hk->hv", state, key[at])
            state = state + torch.einsum("hv,hk->hvk", missing * beta[at][:, None], key[at])
            out = torch.einsum("hvk,hk->hv", state, query[at]) * query.shape[-1] ** -0.5
            core_attn_out[rows[at]] = out.to(core_attn_out.dtype)
            if len(slots) > 1:
                states[slots[at]] = state.to(states.dtype)
        if len(slots) == 1:
            states[slots[0]] = state.to(states.dtype)


def _per_value_head(x: Any, heads: int) -> Any:
    import torch

    return torch.nn.functional.normalize(x, dim=-1, eps=1e-6).repeat_interleave(heads // x.shape[1], dim=1)


def _requests(batch: Any) -> Any:
    """Yield the token rows of each request, its slots, and the count of accepted tokens (0: no state yet)."""
    import torch

    everything = torch.arange(batch.num_actual_tokens)
    if batch.spec_sequence_masks is not None:
        bounds = batch.spec_query_start_loc.tolist()
        for at in range(batch.num_spec_decodes):
            rows = batch.spec_token_indx[bounds[at] : bounds[at + 1]]
            yield rows, batch.spec_state_indices_tensor[at], int(batch.num_accepted_tokens[at])
    if batch.num_decodes + batch.num_prefills:
        order = everything if batch.spec_sequence_masks is None else batch.non_spec_token_indx
        bounds = batch.non_spec_query_start_loc.tolist()
        for at in range(batch.num_decodes + batch.num_prefills):
            started = batch.has_initial_state is None or bool(batch.has_initial_state[at])
            rows = order[bounds[at] : bounds[at + 1]]
            yield rows, batch.non_spec_state_indices_tensor[at : at + 1], int(started)


PATCH = Patch(
    name="vllm_cpu_delta_net",
    target="vllm.model_executor.layers.mamba.ops.cpu.gdn_attention:cpu_gdn_attention_core",
    why="on a CPU, a model with gated delta nets cannot draft, and runs with AMX only",
    requires="vllm==0.24.0",
    source_sha256="e90e75cab8a9fecce1dcbf940799ed8f0bb714318e8a60d2cb178ca36287177e",
    replace=_with_slots,
    needed=vllm_runs_on_cpu,
)
