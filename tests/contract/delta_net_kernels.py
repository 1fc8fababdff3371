"""vLLM's metadata builder and Triton kernels of gated delta nets, interpreted on a CPU, against a recurrence in torch.

    python tests/contract/delta_net_kernels.py SEED ROUNDS [PATCH ...]    with these patches only

Random steps of requests: prompts in chunks, drafts that are accepted in part, steps without drafts, requests that sit
out a step, and mixtures. Prints the largest error of an output, and the kinds of steps.
"""

# Triton reads at import that it interprets.
# ruff: noqa: E402

import os
import sys

os.environ.update(TRITON_INTERPRET="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_USE_FLASHINFER="0")

import triton.backends


class _Driver:
    @staticmethod
    def is_active():
        return True

    @staticmethod
    def get_benchmarker():
        return lambda call, quantiles: [0.0] * len(quantiles)  # any configuration of a kernel will do


triton.backends.backends.clear()
triton.backends.backends["cpu"] = triton.backends.Backend(compiler=None, driver=_Driver)

import collections
import random
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton.language as tl
import vllm.model_executor.layers.fla.ops as fla
from triton.runtime.interpreter import _implicit_cvt
from vllm.model_executor.layers.fla.ops import (
    chunk_delta_h,
    chunk_o,
    chunk_scaled_dot_kkt,
    fused_recurrent,
)
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as qwen
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MambaSpec

from verl_rhyme import patches

HEADS, VALUE_HEADS, DIM, WIDTH, DRAFTS, SLOTS = 1, 2, 16, 4, 3, 64
QKV = 2 * HEADS * DIM + VALUE_HEADS * DIM
BLOCKS = 1 + DRAFTS


def interpreted():
    """The interpreter knows functions of ``tl``, not the names that modules bind to them."""
    for module in (chunk_delta_h, chunk_o, chunk_scaled_dot_kkt, fused_recurrent):
        for name in ("exp", "exp2"):
            if hasattr(module, name):
                setattr(module, name, (lambda of: lambda x: getattr(tl, of)(x))(name))
    # Its loops count in ints, which have no methods of a tensor.
    chunk_delta_h.range = lambda *bounds: map(_implicit_cvt, range(*map(int, bounds)))


class Layer:
    """A layer's weights and cache for ``_forward_core``; q, k and v come projected."""

    def __init__(self):
        torch.manual_seed(0)
        self.prefix, self.activation, self.tp_size = "layer", "silu", 1
        self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim = HEADS, VALUE_HEADS, DIM, DIM
        self.key_dim, self.value_dim = HEADS * DIM, VALUE_HEADS * DIM
        self.enable_packed_recurrent_decode = True
        self.A_log, self.dt_bias = torch.randn(VALUE_HEADS) * 0.3, torch.randn(VALUE_HEADS) * 0.3
        self.conv1d = SimpleNamespace(weight=torch.randn(QKV, 1, WIDTH) * 0.5, bias=None)
        conv = torch.full((SLOTS, WIDTH - 1 + DRAFTS, QKV), 7.0)
        self.kv_cache = conv, torch.full((SLOTS, VALUE_HEADS, DIM, DIM), 7.0)

    rearrange_mixed_qkv = qwen.QwenGatedDeltaNetAttention.rearrange_mixed_qkv

    def __getattr__(self, name):
        return getattr(qwen.QwenGatedDeltaNetAttention, name).__get__(self)

    @staticmethod
    def chunk_gated_delta_rule(**inputs):
        for name in ("q", "k", "v", "beta"):  # the kernel takes no float32, the interpreter no bfloat16
            inputs[name] = inputs[name].half()
        out, state = fla.chunk_gated_delta_rule(**inputs)
        return out.float(), state


def recurrence(layer, mixed, a, b):
    """Outputs of a whole sequence: [tokens, value heads, dim]."""
    padded = F.pad(mixed.T, (WIDTH - 1, 0))
    conv = F.silu((padded.unfold(1, WIDTH, 1) * layer.conv1d.weight).sum(-1).T)
    q, k, v = conv.split([HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM], dim=-1)
    q, k = (F.normalize(x.view(-1, HEADS, DIM), dim=-1).repeat_interleave(VALUE_HEADS // HEADS, 1) for x in (q, k))
    v = v.view(-1, VALUE_HEADS, DIM)
    decay = (-layer.A_log.exp() * F.softplus(a + layer.dt_bias)).exp()
    state, outputs = torch.zeros(VALUE_HEADS, DIM, DIM), []
    for t in range(len(mixed)):
        state = state * decay[t][:, None, None]
        error = (v[t] - torch.einsum("hvk,hk->hv", state, k[t])) * b[t].sigmoid()[:, None]
        state = state + torch.einsum("hv,hk->hvk", error, k[t])
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]) * DIM**-0.5)
    return torch.stack(outputs)


class Request:
    """``known``: tokens to compute before the next is sampled; more than the prompt after a preemption."""

    def __init__(self, rng, blocks):
        self.blocks, self.prompt = blocks, rng.choice([1, 2, 5, 30, 70, 140])
        self.length = self.prompt + rng.randrange(4, 30)
        self.known, self.computed, self.accepted = self.prompt, 0, 1
        self.inputs = self.random(self.prompt)

    @staticmethod
    def random(tokens):
        return [torch.randn(tokens, QKV), torch.randn(tokens, VALUE_HEADS), torch.randn(tokens, VALUE_HEADS)]

    def take(self, tokens):
        """Inputs of all tokens with this step's; of rejected drafts they are others than before."""
        new = self.random(max(0, self.computed + tokens - self.known))
        return [torch.cat([held[: self.known], x]) for held, x in zip(self.inputs, new, strict=True)]


def builder():
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False), max_cudagraph_capture_size=None
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTS, parallel_drafting=False),
        scheduler_config=SimpleNamespace(max_num_seqs=16),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    qwen._resolve_gdn_prefill_backend = lambda *_: ("triton", "triton")
    spec = MambaSpec(block_size=64, shapes=((1,),), dtypes=(torch.float32,), num_speculative_blocks=DRAFTS)
    return GDNAttentionMetadataBuilder(spec, ["layer"], config, torch.device("cpu"))


def region(entry):
    """As vLLM orders a batch (``reorder_batch_to_split_decodes_and_prefills``)."""
    request, tokens, _ = entry
    if request.computed == 0:
        return 3
    return 2 if tokens > 1 + DRAFTS else int(request.computed < request.prompt)


def step(layer, build, running, rng):
    """Compute one step of some of the requests and return the largest error, and the step's kind."""
    draft = rng.random() < 0.6
    batch = [r for r in running if rng.random() < 0.8] or running[:1]
    plan = []
    for request in batch:
        left = request.known - request.computed
        drafts = 0 if left > 0 or not draft else rng.randrange(DRAFTS + 1)
        plan.append((request, min(left, rng.choice([1, 3, 64, 80])) if left > 0 else 1 + drafts, left <= 0))
    plan.sort(key=region)
    counts = torch.tensor([request.accepted for request, _, _ in plan], dtype=torch.int32)
    drafted = torch.tensor(
        # as patches/vllm_gdn_counts.py has it
        [tokens - 1 if decode or tokens == 1 else -1 for _, tokens, decode in plan],
        dtype=torch.int32,
    )
    if "vllm_gdn_counts" not in sys.argv:  # as vLLM reports them
        drafted[drafted == 0] = -1
    for request in [r for r, tokens, _ in plan if tokens == 1 and not r.computed and "vllm_gdn_counts" in sys.argv]:
        for cache in layer.kv_cache:
            cache[request.blocks[0]] = 0
    speculates = bool((drafted > 0).any()) or "vllm_gdn_counts" in sys.argv
    lengths = torch.tensor([tokens for _, tokens, _ in plan], dtype=torch.int32)
    starts = F.pad(lengths.cumsum(0), (1, 0)).int()
    before = torch.tensor([request.computed for request, _, _ in plan], dtype=torch.int32)
    metadata = build.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=before + lengths,
            _seq_lens_cpu=before + lengths,
            _num_computed_tokens_cpu=before,
            num_reqs=len(plan),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int((before + lengths).max()),
            block_table_tensor=torch.tensor([request.blocks for request, _, _ in plan], dtype=torch.int32),
            slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
            is_prefilling=torch.tensor([not decode for _, _, decode in plan]),
        ),
        **({"num_accepted_tokens": counts, "num_decode_draft_tokens_cpu": drafted} if speculates else {}),
    )
    for sizes in (metadata.nums_dict or {}).values():  # the grid of the convolution replaces its arguments by these
        for name in ("batch_ptr", "token_chunk_offset_ptr"):
            sizes[name] = _implicit_cvt(sizes[name])
    inputs = [request.take(tokens) for request, tokens, _ in plan]
    packed = [
        torch.cat([x[i][r.computed : r.computed + t] for x, (r, t, _) in zip(inputs, plan, strict=True)])
        for i in range(3)
    ]
    out = torch.full((int(starts[-1]), VALUE_HEADS, DIM), torch.nan)
    qwen.get_forward_context = lambda: SimpleNamespace(attn_metadata={"layer": metadata})
    qwen.QwenGatedDeltaNetAttention._forward_core(layer, packed[0].clone(), packed[2], packed[1], out)
    worst = 0.0
    for row, ((request, tokens, decode), held) in enumerate(zip(plan, inputs, strict=True)):
        wanted = recurrence(layer, *(x[: request.computed + tokens] for x in held))[-tokens:]
        worst = max(worst, float((out[starts[row] : starts[row + 1]] - wanted).abs().max().nan_to_num(9)))
        request.inputs, request.accepted = held, rng.randrange(1, tokens + 1) if decode else 1
        request.computed += request.accepted if decode else tokens
        request.known = max(request.known, request.computed)
    decodes = [tokens for _, tokens, decode in plan if decode]
    kinds = {"prompts": len(decodes) < len(plan), "drafts": any(t > 1 for t in decodes), "plain": 1 in decodes}
    return worst, "+".join(kind for kind, is_there in kinds.items() if is_there)


def main(seed, rounds):
    rng = random.Random(seed)
    interpreted()
    for patch in patches.VLLM:
        if patch.name in sys.argv and patch.module in sys.modules:
            assert patches.apply(patch).state is patches.State.APPLIED, patch
    layer, build = Layer(), builder()
    free = collections.deque(range(1, SLOTS))
    running, worst = [], collections.Counter()
    for _ in range(rounds):
        while len(running) < 5 and len(free) >= BLOCKS:
            running.append(Request(rng, [free.popleft() for _ in range(BLOCKS)]))
        error, kind = step(layer, build, running, rng)
        worst[kind] = max(worst[kind], error)
        for request in running:
            if rng.random() < 0.05:  # preempted: its blocks are lost
                request.computed, request.accepted = 0, 1
        for request in [r for r in running if r.computed >= r.length]:
            running.remove(request)
            free.extend(request.blocks)
    print(max(worst.values()), dict(worst))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
