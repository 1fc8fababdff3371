"""How many bytes a run takes on each GPU, by component and phase. Pure arithmetic: nothing is imported or measured.

Written for steady state: optimizer states exist, and gradients of earlier micro-batches do where there are any. Not
counted: the CUDA context and NCCL's buffers (:data:`CONTEXT`, added once a GPU), fragmentation of the allocator.

Symbols: t tokens of a micro-batch on one GPU, h hidden, f MLP width, a all queries, k all keys, V vocabulary, b bytes
of an element in computation.

Sources: Korthikanti et al. 2022 (arXiv:2205.05198), sections 4 and 5, for what a layer keeps, with SwiGLU instead of
GELU, no dropout, and attention that keeps no t x t scores; Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), section 3,
for parameters, gradients and Adam; Megatron-LM's docs/dist_optimizer.md for 6 + 12/d bytes a parameter; Narayanan et
al. 2021 (arXiv:2104.04473), section 2.2, for the micro-batches in flight of a pipeline; and the source of verl 0.9.1,
transformers 5.9, megatron-core 0.16 and vLLM 0.24 for which tensor is kept in which type.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_rhyme.checks.preflight.architecture import Architecture
from verl_rhyme.drafting.guesses import HEAD_BUFFER, HEAD_POSITIONS, MOST_TOKENS

#: Bytes of CUDA's context, cuBLAS workspaces and NCCL's buffers, a round figure (not measured here).
CONTEXT = 2 << 30


@dataclass(frozen=True)
class Training:
    """How the actor is trained.

    Attributes:
        engine: ``"megatron"``, ``"fsdp"`` (also FSDP2), or ``"torch"`` (one process, nothing sharded or gathered).
        world: GPUs of the training pool.
        tp, pp, cp: Megatron's tensor, pipeline and context parallel sizes.
        sequence_parallel: Megatron: norms and residuals are split over ``tp`` as well.
        distributed_optimizer: Megatron: master weights and Adam states are split over data and context parallel ranks.
        shards: FSDP: over how many GPUs parameters, gradients and states are split.
        tokens: Of one micro-batch on one GPU (after the context or Ulysses split).
        log_prob_tokens: The same, when old log-probs are recomputed; ``None`` where they never are.
        recompute: Keep only each layer's input, and compute the rest again (full activation checkpointing).
        accumulate: More than one micro-batch is added up before a step: gradients exist while activations do.
        parameter_bytes, compute_bytes, reduce_bytes: Of an element of a stored parameter, in computation, and of a
            gradient that is reduced.
        fused_loss: FSDP: flash-attn's cross-entropy, which works in place; else verl's torch fallback.
        fused_kernels: verl's ``use_fused_kernels``: the logits are never whole.
        entropy: The entropy is computed in the update as well (``entropy_coeff`` is not 0).
        chunked_entropy: It is computed chunk by chunk, or compiled into one kernel.
        foreach: Adam works on all tensors at once, as torch does on GPUs, and takes one more copy of them.
        parameter_offload, optimizer_offload: On the host when the actor is not training.
        always_offloaded: FSDP2's offload policy: parameters, gradients and states never leave the host.
    """

    engine: str
    world: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = True
    distributed_optimizer: bool = True
    shards: int = 1
    tokens: int = 0
    log_prob_tokens: int | None = None
    recompute: bool = False
    accumulate: bool = True
    parameter_bytes: int = 4
    compute_bytes: int = 2
    reduce_bytes: int = 4
    fused_loss: bool = True
    fused_kernels: bool = False
    entropy: bool = False
    chunked_entropy: bool = False
    foreach: bool = True
    parameter_offload: bool = False
    optimizer_offload: bool = False
    always_offloaded: bool = False

    @property
    def replicas(self) -> int:
        """Ranks that hold the same Megatron parameters; the distributed optimizer splits its states over them."""
        return max(1, self.world // (self.tp * self.pp))


@dataclass(frozen=True)
class Rollout:
    """How vLLM serves.

    Attributes:
        tp, pp: Its parallel sizes.
        utilization: ``gpu_memory_utilization``, a share of the whole GPU.
        max_model_len, max_num_seqs, max_num_batched_tokens: vLLM's, in tokens and rows.
        longest: Tokens of the run's longest request, prompt and response.
        weight_bytes, cache_bytes: Of an element of a weight and of the KV cache.
        draft_bytes: What the logits of draft tokens may take, on top of what vLLM profiles.
        draft_head: There is one.
    """

    tp: int = 1
    pp: int = 1
    utilization: float = 0.5
    max_model_len: int = 0
    longest: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    weight_bytes: int = 2
    cache_bytes: int = 2
    draft_bytes: int = 0
    draft_head: bool = False


@dataclass(frozen=True)
class Phase:
    """What is on one GPU at the fullest moment of a phase: bytes by component."""

    components: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.components.values())


# ---- training ----


def states(model: Architecture, training: Training) -> dict[str, int]:
    """Parameters, gradients and optimizer states of one GPU, in bytes, wherever they lie.

    Megatron: bf16 parameters, fp32 gradients, fp32 master weights and Adam's two moments: 2 + 4 + 12/d bytes a
    parameter, d being the data and context parallel ranks under the distributed optimizer, else 1.
    FSDP: parameters, gradients and both moments in the type of the stored parameter (verl: fp32), over all shards.
    """
    if training.engine == "megatron":
        count = model.rank_parameters(training.tp, training.pp)
        split = training.replicas if training.distributed_optimizer else 1
        return {"parameters": 2 * count, "gradients": 4 * count, "optimizer": -(-12 * count // split)}
    count = -(-model.parameters // training.shards) * training.parameter_bytes
    return {"parameters": count, "gradients": count, "optimizer": 2 * count}


def layer_activations(model: Architecture, training: Training, tokens: int) -> int:
    """Bytes that one layer keeps for its backward pass.

    Megatron (fused norms, bf16): inputs of both norms and of both linear pairs, q, k, v, the attention's output, both
    halves of the MLP and their product: b t (4h + 2a + 2k + 3f); all but the 4h are split over ``tp``, and these as
    well under sequence parallelism.
    transformers (eager norms): a norm keeps its input in fp32, the normalised input and its output, (4 + 2b) h bytes;
    attention q, k, v and its output; the MLP gate, silu(gate), up and their product. Qwen3's query and key norms keep
    their fp32 input and the normalised one.
    """
    h, f, a, k, b = model.hidden, model.ffn, model.query, model.key, training.compute_bytes
    if training.engine == "megatron":
        outside = 4 * h // (training.tp if training.sequence_parallel else 1)
        norms = model.qk_norm * 2 * (a + k) // 2
        return tokens * b * (outside + (2 * a + 2 * k + 3 * f + norms) // training.tp)
    norms = 2 * (4 + 2 * b) * h + model.qk_norm * (4 + b) * (a + k)
    return tokens * (norms + b * (2 * a + 2 * k + 4 * f) + 4 * model.heads)


def _layer_backward(model: Architecture, training: Training, tokens: int) -> int:
    """Gradients of activations in flight while a layer's MLP goes backward, its widest place, and of one matrix."""
    width = 2 * model.hidden + 2 * model.ffn // training.tp
    gradient = 0 if training.engine == "megatron" else model.hidden * model.ffn  # Megatron adds into its buffer
    return training.compute_bytes * (tokens * width + gradient)


def loss_bytes(model: Architecture, training: Training, tokens: int) -> int:
    """Bytes around the logits at the fullest moment of forward and backward, final norm included.

    Megatron: logits in bf16, which vocab-parallel cross-entropy turns into an fp32 softmax in place of which the
    gradient is written, and that gradient in bf16: (2 + 4 + 2) t V / tp; with the entropy a copy of the logits and
    its fp32 softmax as well.
    FSDP: flash-attn's loss works in place, b t V; verl's fallback holds the logits and logsumexp's gradient twice, by
    row and stacked: 3 b t V; then the output embedding's gradient beside that of the logits. The eager entropy keeps
    a softmax and its gradient.
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
    """The fullest moment of forward and backward."""
    held = states(model, training)
    if training.always_offloaded:
        held = dict.fromkeys(held, 0)
    if not training.accumulate and training.engine != "megatron":
        held["gradients"] = 0
    tokens, layers = training.tokens, -(-model.layers // training.pp)
    layer = layer_activations(model, training, tokens)
    split = training.tp if training.engine == "megatron" and training.sequence_parallel else 1
    kept = tokens * training.compute_bytes * model.hidden // split if training.recompute else layer
    # The first stage of a pipeline has pp micro-batches in flight, the last one the loss and one.
    backward = _layer_backward(model, training, tokens) + (layer if training.recompute else 0)
    backward += _gathered_layers(model, training, backward=True)
    end = 0
    if model.tied and training.engine != "megatron":
        # The one gradient of both embeddings: the output's part waits for the input's, and a third holds their sum.
        backward += training.compute_bytes * model.embedding
        end = 3 * training.compute_bytes * model.embedding
    loss = loss_bytes(model, training, tokens)
    first, last = (training.pp * layers * kept, backward), (layers * kept, max(loss, backward))
    moments = [last, (0, end)]
    if training.pp > 1:
        moments.append(first)
    activations, transient = max(moments, key=sum)
    return Phase(
        {**held, "gathered": _gathered_root(model, training), "activations": activations, "transient": transient}
    )


def _gathered_root(model: Architecture, training: Training) -> int:
    """FSDP: the root unit (embeddings and final norm) stays whole from the forward to the end of the backward pass."""
    if training.engine != "fsdp":
        return 0
    return training.compute_bytes * (model.parameters - model.layers * model.layer())


def _gathered_layers(model: Architecture, training: Training, backward: bool) -> int:
    """FSDP: two layers are whole, one being fetched ahead; going backward so are one layer's gradients, in the type of
    the computation and again in that of the reduction."""
    if training.engine != "fsdp":
        return 0
    gradients = training.compute_bytes + training.reduce_bytes if backward else 0
    return (2 * training.compute_bytes + gradients) * model.layer()


def optimizer_step(model: Architecture, training: Training) -> Phase:
    """Adam: no activations, but the square root of the second moment, of all tensors at once (foreach) or of one."""
    held = states(model, training)
    if training.always_offloaded:
        return Phase(dict.fromkeys(held, 0))
    if training.engine == "megatron":
        extra = 0  # fused Adam
    elif training.foreach:
        extra = held["parameters"]
    else:
        largest = max(model.embedding, model.hidden * model.ffn)
        extra = 2 * -(-largest // training.shards) * training.parameter_bytes
    return Phase({**held, "temporary": extra})


def log_prob(model: Architecture, training: Training) -> Phase | None:
    """Old log-probs and entropies, without gradients: logits, and for the eager entropy a softmax and a product."""
    tokens = training.log_prob_tokens
    if tokens is None:
        return None
    held = states(model, training)
    if training.always_offloaded:
        held = dict.fromkeys(held, 0)
    b, table = training.compute_bytes, 0 if training.fused_kernels else tokens * model.vocab
    if training.engine == "megatron":
        logits = table * (2 + 2 + 4) // training.tp
    else:
        held["gradients"] = 0
        logits = b * table * (1 if training.chunked_entropy else 3)
    layer = tokens * b * (2 * model.hidden + 3 * model.ffn // training.tp)
    gathered = _gathered_root(model, training) + _gathered_layers(model, training, backward=False)
    return Phase({**held, "gathered": gathered, "activations": layer, "transient": logits})


def resident(model: Architecture, training: Training) -> int:
    """Bytes of the actor that stay on the GPU while vLLM samples on it."""
    if training.always_offloaded:
        return 0
    held = states(model, training)
    kept = 0 if training.parameter_offload else held["parameters"]
    if training.engine == "megatron" and not training.parameter_offload:
        kept += held["gradients"]  # a buffer; FSDP's gradients are gone after the step
    return kept + (0 if training.optimizer_offload else held["optimizer"])


def offloaded(model: Architecture, training: Training) -> int:
    """Bytes a GPU's process keeps in host memory while the actor does not train (with FSDP2's policy: always)."""
    held = states(model, training)
    if training.always_offloaded:
        return sum(held.values())
    # Megatron's gradient buffer is dropped, not copied
    return training.parameter_offload * held["parameters"] + training.optimizer_offload * held["optimizer"]


# ---- rollout ----


def cache_bytes_per_token(model: Architecture, rollout: Rollout) -> int:
    """KV cache of one token on one GPU: 2 x layers x key heads x head_dim x bytes (vLLM's ``FullAttentionSpec``).

    Fewer key heads than tensor-parallel ranks are replicated, one a rank.
    """
    heads = max(1, model.kv_heads // rollout.tp)
    return 2 * -(-model.layers // rollout.pp) * heads * model.head_dim * rollout.cache_bytes


@dataclass(frozen=True)
class Serving:
    """What vLLM makes of its share of a GPU.

    Attributes:
        share: ``utilization`` of the GPU, bytes.
        weights, activations: Bytes of it that are not KV cache; ``activations`` is the peak of its profile run.
        cache: Bytes left for the KV cache, below 0 where nothing is.
        bytes_per_token, tokens, sequences: KV cache of a token, tokens that fit on one replica, and how many of the
            run's longest requests that is.
    """

    share: int
    weights: int
    activations: int
    cache: int
    bytes_per_token: int
    tokens: int
    sequences: float


def serve(model: Architecture, rollout: Rollout, gpu_bytes: int) -> Serving:
    """Split ``utilization`` of a GPU into weights, the profile run's peak, and KV cache.

    The profile run is a step of ``max_num_batched_tokens``: residual, norm, both halves of the MLP and their product,
    and for ``max_num_seqs`` rows the logits and two fp32 tables of the sampler, which are not split over ``tp``.
    """
    weights = rollout.weight_bytes * model.rank_parameters(rollout.tp, rollout.pp)
    forward = rollout.max_num_batched_tokens * rollout.weight_bytes * (3 * model.hidden + 3 * model.ffn // rollout.tp)
    sampler = rollout.max_num_seqs * model.vocab * (rollout.weight_bytes + 8)
    share = int(rollout.utilization * gpu_bytes)
    per_token = cache_bytes_per_token(model, rollout)
    cache = share - weights - max(forward, sampler)
    tokens = max(0, cache) // per_token
    sequences = tokens / rollout.longest if rollout.longest else 0.0
    return Serving(share, weights, max(forward, sampler), cache, per_token, tokens, sequences)


def draft_head(model: Architecture, rollout: Rollout) -> int:
    """Of a draft head, which stays while vLLM sleeps: buffer, float32 parameters, gradients and moments, a bf16 copy,
    bf16 rows, and these once more while they are copied, or the distributions that it is trained towards; what its CUDA
    graphs hold for the widest batch."""
    if not rollout.draft_head:
        return 0
    rows = min(model.vocab, MOST_TOKENS)
    graphs = 16 << max(0, rollout.max_num_seqs - 1).bit_length()
    transient = max(4 * model.hidden, 16 * HEAD_POSITIONS)
    return HEAD_BUFFER + 18 * 3 * model.hidden**2 + rows * (4 * model.hidden + transient + graphs)


def checkpoint_bytes(model: Architecture) -> int:
    """A checkpoint of the actor: weights in bf16, and fp32 master weights and both moments, 2 + 12 a parameter."""
    return 14 * model.parameters
