"""Arithmetic of the bytes of a run on each GPU, by component and phase.

The estimate is of the steady state: optimizer states exist, and gradients of earlier micro-batches do if there are any.
It leaves out fragmentation of the allocator, and the CUDA context and NCCL's buffers (:data:`CONTEXT`, which
``estimate.py`` adds once per GPU).

Symbols: t tokens of a micro-batch on one GPU, h hidden, f MLP width, a all queries, k all keys, V vocabulary, b bytes
of an element in computation.

Sources: Korthikanti et al. 2022 (arXiv:2205.05198), sections 4 and 5, for what a layer keeps, with SwiGLU instead of
GELU, no dropout, and attention that keeps no t x t scores; Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), section 3,
for parameters, gradients and Adam; Megatron-LM's docs/dist_optimizer.md for 6 + 12/d bytes per parameter; Narayanan et
al. 2021 (arXiv:2104.04473), section 2.2, for the micro-batches in flight of a pipeline; and the source of verl 0.9.1,
transformers 5.9, megatron-core 0.16 and vLLM 0.24 for which tensor is kept in which type.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_rhyme.drafting.bounds import affordable_tokens
from verl_rhyme.planning.architecture import Architecture

#: Bytes of CUDA's context, cuBLAS workspaces and NCCL's buffers, a round figure (not measured).
CONTEXT = 2 << 30


@dataclass(frozen=True)
class Training:
    """Training settings of the actor."""

    engine: str  # "megatron", "fsdp" (also FSDP2), or "torch" (one process, nothing sharded or gathered)
    world: int = 1  # GPUs of the training pool
    tp: int = 1  # Megatron's tensor, pipeline (pp) and context (cp) parallel sizes
    pp: int = 1
    cp: int = 1
    ep: int = 1  # Megatron's expert model parallel size
    expert_tp: int = 1  # and the tensor parallel size of experts
    sequence_parallel: bool = True  # Megatron: whether ``tp`` also splits norms and residuals
    #: Megatron: whether data and context parallel ranks split master weights and Adam states
    distributed_optimizer: bool = True
    shards: int = 1  # FSDP: GPUs over which parameters, gradients and states are split
    tokens: int = 0  # of one micro-batch on one GPU (after the context or Ulysses split)
    log_prob_tokens: int | None = None  # the same for old log-probs; ``None`` if they are not recomputed
    recompute: bool = False  # whether only each layer's input is kept (full activation checkpointing)
    accumulate: bool = True  # whether several micro-batches do: gradients exist at the same time as activations
    parameter_bytes: int = 4  # per element of stored parameters
    compute_bytes: int = 2  # per element in computation
    reduce_bytes: int = 4  # per element of reduced gradients
    fused_loss: bool = True  # FSDP: flash-attn computes the cross-entropy in place; else verl's torch fallback does
    fused_kernels: bool = False  # verl's ``use_fused_kernels``, which never materialises the whole logits
    entropy: bool = False  # whether the update also computes the entropy (``entropy_coeff`` is not 0)
    chunked_entropy: bool = False  # whether it is computed chunk by chunk, or compiled into one kernel
    foreach: bool = True  # Adam processes all tensors at once, as torch does on GPUs, with one more copy of them
    parameter_offload: bool = False  # whether parameters are on the host while the actor is not training
    optimizer_offload: bool = False  # the same for optimizer states
    always_offloaded: bool = False  # FSDP2's offload policy: parameters, gradients and states stay on the host

    @property
    def replicas(self) -> int:
        """Number of ranks with the same Megatron parameters, over which the distributed optimizer splits its states."""
        return max(1, self.world // (self.tp * self.pp))

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that split the experts of a layer."""
        return self.ep * self.expert_tp

    @property
    def expert_replicas(self) -> int:
        """Number of ranks with the same Megatron parameters of experts."""
        return max(1, self.world // (self.expert_ranks * self.pp))


@dataclass(frozen=True)
class Rollout:
    """Settings of vLLM."""

    tp: int = 1
    pp: int = 1
    dp: int = 1  # vLLM splits experts over ``tp`` x ``dp`` ranks, with expert parallelism or without
    utilization: float = 0.5  # ``gpu_memory_utilization``, a share of the whole GPU
    max_model_len: int = 0  # tokens
    longest: int = 0  # tokens of the run's longest request, prompt and response
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    weight_bytes: int = 2  # per element
    cache_bytes: int = 2  # per element of the KV cache
    requests: int = 0  # that the run has in an engine at once
    draft_tokens: int = 0  # most of a request in a step; each has a state of recurrent layers
    draft_bytes: int = 0  # for the logits of draft tokens, in addition to vLLM's profiled peak
    text_bytes: int = 0  # of decoded histories and of live texts in a replica's host memory
    host_cache: int = 0  # bytes of KV blocks in a replica's host memory (vLLM's ``kv_offloading_size``)
    adapters: int = 0  # rank of LoRA adapters that vLLM keeps apart from the weights


@dataclass(frozen=True)
class Drafter:
    """Sizes of the model's own drafter in vLLM, on one GPU."""

    parameters: int
    cache_values: int  # keys and values of a token


@dataclass(frozen=True)
class Phase:
    """Bytes by component on one GPU at the peak of a phase."""

    components: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.components.values())


# ---- training ----


def states(model: Architecture, training: Training) -> dict[str, int]:
    """Return the bytes of one GPU's parameters, gradients and optimizer states, whether offloaded or not.

    Megatron: bf16 parameters, fp32 gradients, fp32 master weights and two moments, split over the d data and context
    parallel ranks: 2 + 4 + 12/d; those of experts over the ranks that hold the same ones. FSDP: four times the stored
    type (verl: fp32), over all shards.
    """
    if training.engine == "megatron":
        count = model.rank_parameters(training.tp, training.pp, training.expert_ranks)
        experts = model.rank_experts(training.expert_ranks, training.pp)
        split, split_experts = training.replicas, training.expert_replicas
        if not training.distributed_optimizer:
            split = split_experts = 1
        optimizer = -(-12 * (count - experts) // split) - (-12 * experts // split_experts)
        return {"parameters": 2 * count, "gradients": 4 * count, "optimizer": optimizer}
    count = -(-model.parameters // training.shards) * training.parameter_bytes
    return {"parameters": count, "gradients": count, "optimizer": 2 * count}


def _held(model: Architecture, training: Training) -> dict[str, int]:
    """Return the bytes of :func:`states` on a GPU that trains."""
    held = states(model, training)
    return dict.fromkeys(held, 0) if training.always_offloaded else held


def layer_activations(model: Architecture, training: Training, tokens: int) -> int:
    """Return the bytes that one layer keeps for its backward pass.

    Megatron (fused norms, bf16): inputs of both norms and of both linear pairs, q, k, v, the attention's output, both
    halves of the MLP and their product: b t (4h + 2a + 2k + 3f). ``tp`` splits all but the 4h, and these as well under
    sequence parallelism. transformers (eager norms): a norm keeps (4 + 2b) h bytes, the MLP gate, silu(gate), up and
    their product; Qwen3's query and key norms keep their fp32 input and the normalised one. A mixture keeps f of all
    experts of a token, and their inputs and outputs; tokens are assumed to choose experts evenly.
    """
    h, f, a, k, b = model.hidden, model.mlp, model.query, model.key, training.compute_bytes
    experts = 2 * model.dispatched
    if training.engine == "megatron":
        outside = 4 * h // (training.tp if training.sequence_parallel else 1)
        norms = model.qk_norm * 2 * (a + k) // 2
        return tokens * b * (outside + (2 * a + 2 * k + 3 * f + experts + norms) // training.tp)
    norms = 2 * (4 + 2 * b) * h + model.qk_norm * (4 + b) * (a + k)
    return tokens * (norms + b * (2 * a + 2 * k + 4 * f + experts) + 4 * model.heads)


def _layer_backward(model: Architecture, training: Training, tokens: int) -> int:
    """Return the bytes of activation gradients in the backward pass of a layer's MLP, and of one matrix gradient."""
    width = 2 * model.hidden + (2 * model.mlp + model.dispatched) // training.tp
    gradient = 0 if training.engine == "megatron" else model.matrix  # Megatron adds into its buffer
    return training.compute_bytes * (tokens * width + gradient)


def loss_bytes(model: Architecture, training: Training, tokens: int) -> int:
    """Return the peak bytes of logits, loss and final norm in forward and backward.

    Megatron: bf16 logits, an fp32 softmax that the gradient overwrites, and that gradient in bf16; the entropy adds a
    copy of the logits and its fp32 softmax. FSDP: flash-attn's loss works in place, verl's fallback holds 3 b t V. The
    gradients of logits and output embedding then exist together. The eager entropy keeps a softmax and its gradient.
    """
    b, table = training.compute_bytes, 0 if training.fused_kernels else tokens * model.vocab
    if training.engine == "megatron":
        norm = tokens * 2 * 2 * model.hidden // (training.tp if training.sequence_parallel else 1)
        return norm + table * (8 + 6 * training.entropy) // training.tp
    norm = tokens * (4 + 2 * b) * model.hidden
    entropy = 2 * b * table if training.entropy and not training.chunked_entropy else 0
    softmax = (1 if training.fused_loss else 3) * b * table + entropy
    return norm + max(softmax, b * table + b * model.embedding)


def update(model: Architecture, training: Training) -> Phase:
    held = _held(model, training)
    if not training.accumulate and training.engine != "megatron":
        held["gradients"] = 0
    tokens, layers = training.tokens, -(-model.layers // training.pp)
    layer = layer_activations(model, training, tokens)
    split = training.tp if training.engine == "megatron" and training.sequence_parallel else 1
    kept = tokens * training.compute_bytes * model.hidden // split if training.recompute else layer
    # The first pipeline stage has pp micro-batches in flight, the last stage has one, and the loss.
    backward = _layer_backward(model, training, tokens) + (layer if training.recompute else 0)
    backward += _gathered_layers(model, training, backward=True)
    end = 0
    if model.tied and training.engine != "megatron":
        # The gradient of a tied embedding exists three times: the output's part, the input's part and their sum.
        backward += training.compute_bytes * model.embedding
        end = 3 * training.compute_bytes * model.embedding
    loss = loss_bytes(model, training, tokens)
    first, last = (training.pp * layers * kept, backward), (layers * kept, max(loss, backward))
    activations, transient = max(last, (0, end), *([first] if training.pp > 1 else []), key=sum)
    return Phase(
        {**held, "gathered": _gathered_root(model, training), "activations": activations, "transient": transient}
    )


def _gathered_root(model: Architecture, training: Training) -> int:
    """Return the bytes of FSDP's root unit (embeddings, final norm), gathered until the end of the backward pass."""
    if training.engine != "fsdp":
        return 0
    return training.compute_bytes * (model.parameters - model.layers * model.layer())


def _gathered_layers(model: Architecture, training: Training, backward: bool) -> int:
    """Return the bytes of FSDP's gathered layers: the current and the prefetched one. The backward pass adds one
    layer's gradients in the compute type and in the reduction type.
    """
    if training.engine != "fsdp":
        return 0
    gradients = training.compute_bytes + training.reduce_bytes if backward else 0
    return (2 * training.compute_bytes + gradients) * model.layer()


def optimizer_step(model: Architecture, training: Training) -> Phase:
    """Return the peak of Adam's step: the states, and square roots of the second moments, of one tensor or of all."""
    held = _held(model, training)
    if training.engine == "megatron" or training.always_offloaded:
        extra = 0  # fused Adam, or Adam on the host
    elif training.foreach:
        extra = held["parameters"]
    else:
        largest = max(model.embedding, model.matrix)
        extra = 2 * -(-largest // training.shards) * training.parameter_bytes
    return Phase({**held, "temporary": extra})


def log_prob(model: Architecture, training: Training) -> Phase | None:
    """Return the peak of old log-probs and entropies, without gradients, ``None`` if they are not recomputed: the
    logits, and for the eager entropy a softmax and a product.
    """
    tokens = training.log_prob_tokens
    if tokens is None:
        return None
    held = _held(model, training)
    b, table = training.compute_bytes, 0 if training.fused_kernels else tokens * model.vocab
    if training.engine == "megatron":
        logits = table * (2 + 2 + 4) // training.tp
    else:
        held["gradients"] = 0
        logits = b * table * (1 if training.chunked_entropy else 3)
    layer = tokens * b * (2 * model.hidden + (3 * model.mlp + model.dispatched) // training.tp)
    gathered = _gathered_root(model, training) + _gathered_layers(model, training, backward=False)
    return Phase({**held, "gathered": gathered, "activations": layer, "transient": logits})


def resident(model: Architecture, training: Training) -> int:
    """Return the bytes of the actor that stay on the GPU while vLLM generates on it."""
    if training.always_offloaded:
        return 0
    held = states(model, training)
    kept = 0 if training.parameter_offload else held["parameters"]
    if training.engine == "megatron" and not training.parameter_offload:
        kept += held["gradients"]  # Megatron keeps a buffer, FSDP frees its gradients after the step
    return kept + (0 if training.optimizer_offload else held["optimizer"])


def offloaded(model: Architecture, training: Training) -> int:
    """Return the bytes of a GPU's process in host memory while the actor does not train (FSDP2's policy: always)."""
    held = states(model, training)
    if training.always_offloaded:
        return sum(held.values())
    # Megatron frees its gradient buffer without a copy
    return training.parameter_offload * held["parameters"] + training.optimizer_offload * held["optimizer"]


# ---- rollout ----


@dataclass(frozen=True)
class Serving:
    """Split of vLLM's share of a GPU."""

    share: int  # bytes of ``utilization`` of the GPU
    weights: int  # bytes, with those of adapters and of the model's own drafter
    activations: int  # bytes of the peak of vLLM's profile run
    cache: int  # bytes left for the KV cache, negative if the rest does not fit
    bytes_per_token: int  # of KV cache
    draft_tokens: int  # most of a request in a step, as many as the states' memory allows
    state_bytes: int  # of a request in recurrent layers
    tokens: int  # that fit on one replica
    sequences: float  # of the run's longest requests, that fit on one replica
    undrafted: float  # the same without draft tokens


def serve(model: Architecture, rollout: Rollout, gpu_bytes: int, drafter: Drafter | None = None) -> Serving:
    """Return the split of ``utilization`` of a GPU into weights, the profile run's peak, and KV cache.

    The profile run is a step of ``max_num_batched_tokens`` with residual, norm, both halves of the MLP and their
    product, of a mixture those of all experts of a token. For ``max_num_seqs`` requests, it has the logits and two fp32
    tables of the sampler, which ``tp`` does not split. Draft tokens of models with recurrent layers are as many as
    :func:`~verl_rhyme.drafting.bounds.affordable_tokens` allows.
    """
    own = drafter or Drafter(0, 0)
    adapters = -(-model.layers // rollout.pp) * model.adapter(rollout.adapters, rollout.tp)
    held = model.rank_parameters(rollout.tp, rollout.pp, rollout.tp * rollout.dp)
    weights = rollout.weight_bytes * (held + adapters + own.parameters)
    width = 3 * model.hidden + 3 * model.mlp // rollout.tp + model.dispatched
    forward = rollout.max_num_batched_tokens * rollout.weight_bytes * width
    sampler = rollout.max_num_seqs * model.vocab * (rollout.weight_bytes + 8)
    share = int(rollout.utilization * gpu_bytes)
    per_token = (model.cache_values(rollout.tp, rollout.pp) + own.cache_values) * rollout.cache_bytes
    cache = share - weights - max(forward, sampler)

    nets, drafts = model.delta_nets, rollout.draft_tokens

    def states(drafts: int) -> int:
        return nets.state_bytes(drafts, rollout.tp) if nets else 0

    def capacity(drafts: int) -> float:
        return max(0, cache) / (rollout.longest * per_token + states(drafts)) if rollout.longest else 0.0

    if nets:
        drafts = affordable_tokens(drafts, rollout.requests, capacity)
    return Serving(
        share=share,
        weights=weights,
        activations=max(forward, sampler),
        cache=cache,
        bytes_per_token=per_token,
        draft_tokens=drafts,
        state_bytes=states(drafts),
        tokens=max(0, cache - states(drafts)) // per_token,
        sequences=capacity(drafts),
        undrafted=capacity(0),
    )


def checkpoint_bytes(model: Architecture) -> int:
    """Return the bytes of an actor checkpoint: bf16 weights, fp32 master weights and moments, 2 + 12 a parameter."""
    return 14 * model.parameters
