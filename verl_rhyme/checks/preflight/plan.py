"""Plan of a run as verl derives it from the config: pools, parallel sizes, tokens of a micro-batch, vLLM's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import ListConfig, OmegaConf

from verl_rhyme.checks.predicates import Run, adapters_in_engines, engine_drafter
from verl_rhyme.checks.preflight.memory import Rollout, Training
from verl_rhyme.checks.rules import of_config
from verl_rhyme.config import RhymeConfig, config_tree
from verl_rhyme.drafting.bounds import engine_tokens
from verl_rhyme.drafting.recurrent import recurrent
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.weights import BACKEND as RELAY

_BYTES = {"fp32": 4, "float32": 4, "float": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}  # all others: 2

#: Parent folder of the relay's versions, if not shared memory.
RELAY_FOLDER = f"actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.{RELAY}.folder"

#: Engine of the estimate for each of verl's values of ``actor.strategy``.
ENGINES = {"megatron": "megatron", "fsdp": "fsdp", "fsdp2": "fsdp"}


#: Most bytes of a decoded history token (``history/record.py``: token, suffix, confidence, table of first tokens), and
#: of a live token in the drafter's index.
DECODED_BYTES, LIVE_BYTES = 16, 32


@dataclass(frozen=True)
class Plan:
    """Sizes of a run."""

    strategy: str
    device: str
    training: Training | None  # ``None`` where the strategy is not one of :data:`ENGINES`
    rollout: Rollout
    train_gpus: int  # of the training pool
    rollout_gpus: int  # of the rollout pool; the same GPUs where ``colocated``
    gpus_per_node: int  # of the training pool
    colocated: bool  # whether vLLM generates on the training GPUs
    standalone: bool  # whether the run has a separate rollout pool
    sleeps: bool  # whether vLLM frees its memory while the actor trains
    data_parallel: int  # copies of the actor that train on different samples
    model_parallel: int  # GPUs of one copy of the actor
    replica_gpus: int  # GPUs of one vLLM replica
    reference: bool  # whether the run has one
    critic: bool
    lora: int  # rank, 0 without LoRA
    drafter: str | None  # the model's own: mtp, a folder or a hub id
    sent_bytes: int  # per element of the weights in the relay
    relayed: bool  # whether the relay keeps versions in shared memory
    rhyme: RhymeConfig | None  # ``None`` without rhyme, or where it is invalid, which a check reports
    rules: Rules | None  # of the pipeline; ``None`` without one or without ``rhyme``

    @property
    def replicas(self) -> int:
        pools = self.colocated * self.train_gpus + self.standalone * self.rollout_gpus
        return pools // self.replica_gpus

    @property
    def keeps_weights(self) -> bool:
        """Whether sleeping engines keep their weights in host memory (vLLM's level 1): a weight sync restores neither a
        drafter nor the weights below adapters.
        """
        return self.sleeps and self.device != "cpu" and (self.drafter is not None or self.rollout.adapters > 0)


def read(config: Any, fields: Mapping[str, Any] | None = None) -> Plan:
    """Return the plan of verl's resolved config; ``fields`` are those of the model's ``config.json``, if known."""
    ref = config.actor_rollout_ref
    actor, rollout = ref.actor, ref.rollout
    strategy = str(actor.strategy)
    gpus = int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node)
    engine = actor.get(strategy if strategy in ("megatron", "veomni") else "fsdp_config") or {}
    if strategy == "megatron":
        tp, pp, cp = (int(engine[f"{kind}_parallel_size"]) for kind in ("tensor_model", "pipeline_model", "context"))
        split = cp
    else:
        tp = pp = cp = 1
        names = ("ulysses_sequence_parallel_size", "ulysses_parallel_size")  # the second is VeOmni's
        split = max(int(section.get(name) or 1) for section in (engine, actor) for name in names)
    model_parallel = tp * pp * split
    data_parallel = max(1, gpus // model_parallel)
    colocated = bool(ref.get("hybrid_engine", True))
    standalone = config.trainer.v1.trainer_mode == "separate_async"
    lora = int(ref.model.get("lora_rank") or 0) or int((ref.model.get("lora") or {}).get("rank") or 0)
    training = None
    if strategy in ENGINES:
        device = str(config.trainer.device)
        local = -(-int(actor.ppo_mini_batch_size) * int(rollout.n) // data_parallel)
        tokens, whole = _tokens(config, actor, "ppo", local, split, data_parallel)
        bypass = bool(OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"))
        log_prob = None if bypass else _tokens(config, rollout, "log_prob", local, split, data_parallel)[0]
        training = Training(
            engine=ENGINES[strategy],
            world=gpus,
            tp=tp,
            pp=pp,
            cp=cp,
            tokens=tokens,
            log_prob_tokens=log_prob,
            accumulate=whole > tokens,
            fused_kernels=bool(actor.get("use_fused_kernels")),
            entropy=bool(actor.get("entropy_coeff")) or bool(actor.get("calculate_entropy")),
            parameter_offload=bool(engine.get("param_offload")),
            optimizer_offload=bool(engine.get("optimizer_offload")),
            **(_megatron(engine) if strategy == "megatron" else _fsdp(engine, ref, strategy, gpus, device)),
        )
    critic = config.critic.get("enable")
    rhyme, rules = _rhyme(config)
    run = Run(config, rhyme, rules)
    adapters = lora if adapters_in_engines(run) else 0
    plan = Plan(
        strategy=strategy,
        device=str(config.trainer.device),
        training=training,
        rollout=_rollout(config, rhyme, fields or {}, adapters),
        train_gpus=gpus,
        rollout_gpus=int(rollout.nnodes) * int(rollout.n_gpus_per_node) if standalone else gpus,
        gpus_per_node=int(config.trainer.n_gpus_per_node),
        colocated=colocated,
        standalone=standalone,
        sleeps=bool(rollout.free_cache_engine and rollout.get("enable_sleep_mode", True)),
        data_parallel=data_parallel,
        model_parallel=model_parallel,
        replica_gpus=math.prod(
            int(rollout[f"{of}_parallel_size"]) for of in ("tensor_model", "data", "pipeline_model")
        ),
        reference=bool(config.algorithm.use_kl_in_reward or actor.use_kl_loss),
        critic=config.algorithm.adv_estimator == "gae" if critic is None else bool(critic),
        lora=lora,
        drafter=engine_drafter(run),
        sent_bytes=_sent(rollout, training),
        relayed=rollout.checkpoint_engine.backend == RELAY and not OmegaConf.select(config, RELAY_FOLDER),
        rhyme=rhyme,
        rules=rules,
    )
    return replace(plan, rollout=replace(plan.rollout, requests=_requests(config, plan)))


def _requests(config: Any, plan: Plan) -> int:
    """Return the requests that the run has in one engine at once, at most ``max_num_seqs``."""
    slots, samples = plan.rollout.max_num_seqs, float("inf")  # verl's asynchronous modes
    if plan.rules is not None:
        samples = plan.rules.batches * plan.rules.batch_samples
    elif config.trainer.v1.trainer_mode == "sync":
        samples = int(config.data.train_batch_size) * int(config.actor_rollout_ref.rollout.n)
    return math.ceil(min(slots, samples / max(1, plan.replicas)))


def data_files(config: Any, option: str) -> list[str]:
    """Return the files of ``data.train_files`` or ``data.val_files``, which may be one file or a list."""
    listed = OmegaConf.select(config, f"data.{option}") or []
    return [str(file) for file in (listed if isinstance(listed, list | tuple | ListConfig) else [listed])]


def sequence_tokens(config: Any) -> int:
    return int(config.data.max_prompt_length) + int(config.data.max_response_length)


def _tokens(config: Any, section: Any, kind: str, local: int, split: int, data_parallel: int) -> tuple[int, int]:
    """Return the tokens of a micro-batch on one GPU, and of its mini-batch. verl fills a dynamic micro-batch up to its
    budget but never splits a sequence, so one of full length counts if it exceeds the budget.
    """
    longest = -(-sequence_tokens(config) // split)
    whole = local * longest
    dynamic = section.get("use_dynamic_bsz" if kind == "ppo" else "log_prob_use_dynamic_bsz")
    if dynamic:
        return min(whole, max(int(section[f"{kind}_max_token_len_per_gpu"]), longest)), whole
    rows = section.get(f"{kind}_micro_batch_size_per_gpu")
    if rows is None:
        rows = -(-int(section.get(f"{kind}_micro_batch_size") or data_parallel) // data_parallel)
    return min(int(rows), local) * longest, whole


def _megatron(engine: Any) -> dict[str, Any]:
    return {
        "ep": int(engine.get("expert_model_parallel_size") or 1),
        "expert_tp": int(engine.get("expert_tensor_parallel_size") or engine.tensor_model_parallel_size),
        "sequence_parallel": bool(engine.sequence_parallel),
        "distributed_optimizer": bool(engine.use_distributed_optimizer),
        "recompute": (engine.get("override_transformer_config") or {}).get("recompute_granularity") == "full",
        "chunked_entropy": bool(engine.get("entropy_from_logits_with_chunking")),
    }


def _fsdp(engine: Any, ref: Any, strategy: str, gpus: int, device: str) -> dict[str, Any]:
    size = int(engine.get("fsdp_size", -1))
    mixed = engine.get("mixed_precision") or {}
    chunked = bool(engine.get("entropy_from_logits_with_chunking")) or bool(engine.get("use_torch_compile"))
    return {
        "shards": size if 0 < size < gpus else gpus,
        "recompute": bool(ref.model.enable_gradient_checkpointing),
        "parameter_bytes": _size(engine.get("model_dtype") or "fp32"),
        "compute_bytes": _size(mixed.get("param_dtype", "bf16")),
        "reduce_bytes": _size(mixed.get("reduce_dtype", "fp32")),
        "fused_loss": device != "cpu",
        "foreach": device != "cpu",
        "chunked_entropy": chunked,
        "always_offloaded": strategy == "fsdp2" and bool(engine.get("offload_policy")),
    }


def _rhyme(config: Any) -> tuple[RhymeConfig | None, Rules | None]:
    try:
        rhyme = config_tree.from_verl(config)
    except ValueError:  # the check of the rhyme tree reports it
        return None, None
    try:
        return rhyme, of_config(config, rhyme)
    except ValueError:
        return rhyme, None


def _rollout(config: Any, rhyme: RhymeConfig | None, fields: Mapping[str, Any], adapters: int) -> Rollout:
    """``adapters``: rank of the LoRA adapters that the engines get, 0 without."""
    rollout = config.actor_rollout_ref.rollout
    slots, step_tokens = int(rollout.max_num_seqs), int(rollout.max_num_batched_tokens)
    drafting = rhyme.drafting if rhyme and rhyme.drafting.enable else None
    kind = {"recurrent": bool(recurrent(fields)), "adapters": adapters > 0}
    engine = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    cache = str(engine.get("kv_cache_dtype") or "auto")
    return Rollout(
        tp=int(rollout.tensor_model_parallel_size),
        pp=int(rollout.pipeline_model_parallel_size),
        dp=int(rollout.data_parallel_size),
        utilization=float(rollout.gpu_memory_utilization),
        max_model_len=int(rollout.max_model_len or fields.get("max_position_embeddings") or sequence_tokens(config)),
        longest=sequence_tokens(config),
        max_num_seqs=slots,
        max_num_batched_tokens=step_tokens,
        weight_bytes=1 if rollout.get("quantization") else _size(rollout.dtype),
        cache_bytes=_size(rollout.dtype if cache == "auto" else cache),
        draft_tokens=(
            engine_tokens(drafting.max_tokens, slots=slots, step_tokens=step_tokens, **kind) if drafting else 0
        ),
        draft_bytes=drafting.logits_memory if drafting else 0,
        text_bytes=_text_bytes(config, rhyme) if rhyme and drafting else 0,
        host_cache=int(float(engine.get("kv_offloading_size") or 0) * (1 << 30)),
        adapters=adapters,
    )


def _text_bytes(config: Any, rhyme: RhymeConfig) -> int:
    """Return the most bytes of texts for drafts in the memory of one engine: each slot with a prompt of its own."""
    rollout = config.actor_rollout_ref.rollout
    history = int(rollout.n) * rhyme.history.epochs * int(config.data.max_response_length) * DECODED_BYTES
    decoded = min(rhyme.drafting.history_memory, int(rollout.max_num_seqs) * history)
    return decoded + rhyme.drafting.live_tokens * LIVE_BYTES


def _sent(rollout: Any, training: Training | None) -> int:
    """Return the bytes per element that the relay sends: ``weights/engine.py`` casts FSDP's float32 to the type of the
    engines, unless they quantise the weights.
    """
    held = 2 if training is not None and training.engine == "megatron" else getattr(training, "parameter_bytes", 4)
    return held if rollout.get("quantization") else min(held, max(2, _size(rollout.dtype)))


def _size(dtype: Any) -> int:
    return _BYTES.get(str(dtype).removeprefix("torch."), 2)
