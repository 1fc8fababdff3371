"""Table of the verl options that rhyme refuses, with reasons and remedies.

Start-up (:mod:`verl_rhyme.checks.startup`) and the preflight apply it; ``docs/combinations.md`` shows it.
Contradictions between rhyme's own options are refused where they are parsed: sections in :mod:`verl_rhyme.config`, the
pipeline's rules in :mod:`verl_rhyme.scheduling.rules`. :mod:`.predicates` has the conditions of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.doctor import FAIL, Check
from verl_rhyme.checks.predicates import (
    ACTOR,
    ADAPTER,
    CORRECTION,
    ENGINE,
    ESTIMATOR,
    FILTER,
    MEGATRON_ADAPTER,
    MEGATRON_RANK,
    MERGE,
    MODE,
    PROMPT,
    RANK,
    RESPONSE,
    RESUME,
    ROLLOUT,
    SLOTS,
    STRATEGY,
    Run,
    adapters_in_engines,
    below_drafts,
    below_one_response,
    counts_no_states,
    differs_from,
    drafting_model,
    hardly_loads_blocks,
    has_undrafted_layers,
    loads_no_weights,
    other_rank,
    resumes,
    several,
    splits_groups,
    trains_lora,
    uncorrected,
    unread_adapter,
)
from verl_rhyme.checks.rules import of_config
from verl_rhyme.config import CONFIG_PATH, PIPELINES, PRESETS, STOCK, TOPOLOGIES, RhymeConfig
from verl_rhyme.config.backends import backend
from verl_rhyme.config.presets import DRAFTING_MANAGER, MANAGER, PIPELINE_MANAGER, POLICY_LOGPROBS
from verl_rhyme.drafting import recurrent

CRITIC = "critic.checkpoint"
BACKEND = f"{ROLLOUT}.checkpoint_engine.backend"
SEPARATE = "trainer.v1.separate_async"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
DRAFTING = "rhyme.drafting.enable"
BOUND = "rhyme.max_staleness"
REPLAY = f"{ROLLOUT}.enable_rollout_routing_replay"
QUEUE = "transfer_queue.backend"
PLACEMENT = "rhyme.placement.policy"

#: vLLM options that verl sets from its own rollout keys; rhyme reads verl's keys.
VERL_ROLLOUT_KEYS = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "max_num_seqs": "max_num_seqs",
    "scheduling_policy": "scheduling_policy",
    "logprobs_mode": "logprobs_mode",
}

#: Values of ``algorithm.adv_estimator`` that fail in the first training step of verl's V1 trainer, whose
#: ``_compute_advantage`` fetches no reward components, greedy baselines or sums of squared probabilities.
LEGACY_ESTIMATORS = ("gdpo", "optimal_token_baseline", "remax", "tir_optimal_token_baseline")

#: Whether a row applies to a run with a rhyme tree, with drafts, or with the pipeline.
with_rhyme, with_drafts, with_pipeline = map(attrgetter, ("rhyme", "drafting", "pipeline"))


@dataclass(frozen=True)
class Option:
    """A config key that a row checks."""

    key: str  # of verl's config, or ``rhyme.`` and a key of the rhyme tree
    refused: Callable[[Any, Run], bool] = lambda value, run: bool(value)
    remedy: str = ""  # instead of the row's
    named_with: tuple[str, ...] = ()  # further keys that the refusal names


@dataclass(frozen=True)
class Row:
    """Options that are refused for the same reason."""

    options: tuple[Option, ...]  # each refused independently of the others
    when: Callable[[Run], bool]  # whether the row applies to a run
    reason: str
    remedy: str  # unless the option has its own
    named_with: tuple[str, ...] = ()  # further keys that each refusal names


def _engine(*names: str) -> tuple[Option, ...]:
    return tuple(Option(f"{ENGINE}.{name}") for name in names)


#: vLLM's options for KV blocks outside the engine (``kv_offloading_backend``: default "native" keeps them inside).
_ELSEWHERE = ("kv_transfer_config", "kv_offloading_backend")

_POLICY_LOGPROBS = Option(f"{ROLLOUT}.logprobs_mode", lambda mode, run: mode == POLICY_LOGPROBS)
_VERLS_SCHEDULE = "use +rhyme=histospec (verl's own schedule)"
_OTHERS = " or ".join(f"+rhyme={name}" for name in PIPELINES)
_NO_DRAFTING = f"{CONFIG_PATH}.drafting.enable=false"

#: Keys that each refusal of a condition names.
_NAMED: Mapping[Callable[[Run], Any], tuple[str, ...]] = {with_drafts: (DRAFTING,), with_pipeline: (BOUND,)}

TABLE = (
    Row(
        (Option(f"{ROLLOUT}.name", lambda name, run: name != "vllm"),),
        with_rhyme,
        "rhyme drafts and schedules in vLLM only",
        f"set {ROLLOUT}.name=vllm",
    ),
    Row(
        (Option("trainer.use_v1", lambda v1, run: v1 is not None and not v1),),
        with_rhyme,
        "rhyme extends verl's V1 trainer",
        "set trainer.use_v1=true",
    ),
    Row(
        (Option(ESTIMATOR, lambda estimator, run: estimator in LEGACY_ESTIMATORS),),
        lambda run: run.rhyme is not None and run.topology is not None,
        "verl's V1 trainer does not compute what this estimator needs, and would fail after the first rollout",
        "set another one, such as grpo",
    ),
    Row(
        (Option(f"{ROLLOUT}.disaggregation.enabled"), *_engine(*_ELSEWHERE, "worker_extension_cls")),
        with_rhyme,
        "rhyme needs prefill, decoding and their KV blocks in one engine, with its own worker extension",
        f"drop it, or set {CONFIG_PATH}.enable=false",
    ),
    Row(
        (Option(f"{ENGINE}.kv_offloading_size", hardly_loads_blocks),),
        with_rhyme,
        "vLLM 0.24 hardly loads the blocks that it stores of a model with recurrent layers or its own drafter",
        "drop the first option",
        ("actor_rollout_ref.model.path",),
    ),
    Row(
        (Option(f"{ENGINE}.kv_offloading_size"),),
        lambda run: run.rhyme is not None and bool(run.value(REPLAY)),
        "vLLM 0.24 has no expert routing of blocks in host memory",
        "drop one of them",
        (REPLAY,),
    ),
    Row(
        _engine("config"),
        with_rhyme,
        "rhyme reads all engine options from verl's config",
        f"move the options of that file to {ENGINE}",
    ),
    Row(
        (
            *_engine("speculative_config", "spec_method", "spec_model", "spec_tokens"),
            *_engine("scheduler_cls", "enable_dbo"),
            Option(f"{ENGINE}.ubatch_size", several),
        ),
        with_drafts,
        "rhyme chooses vLLM's drafter (drafting.model) and its scheduler, and rhyme's sampler verifies whole batches",
        f"drop the first option, or set {_NO_DRAFTING}",
    ),
    Row(
        (Option(f"{ROLLOUT}.mtp.enable_rollout", lambda mtp, run: bool(mtp and run.value(f"{ROLLOUT}.mtp.enable"))),),
        lambda run: drafting_model(run) not in (None, "mtp"),
        "vLLM takes one drafter of the model",
        f"drop {CONFIG_PATH}.drafting.model, or set actor_rollout_ref.model.mtp.enable_rollout=false",
        ("rhyme.drafting.model",),
    ),
    Row(
        (Option("rhyme.drafting.policy", lambda policy, run: policy == "paper"),),
        lambda run: drafting_model(run) is not None,
        "the paper's drafter has texts only",
        "set actor_rollout_ref.model.mtp.enable_rollout=false, or drop the option",
        (f"{ROLLOUT}.mtp.enable_rollout",),
    ),
    Row(
        (Option(REPLAY),),
        lambda run: drafting_model(run) is not None,
        "in vLLM 0.24 the drafter of a mixture-of-experts model overwrites the expert routing that is replayed",
        f"drop the first option, or set {_NO_DRAFTING}",
        (DRAFTING,),
    ),
    Row(
        _engine("logits_processors", "diffusion_config"),
        lambda run: run.rhyme is not None and run.rhyme.draws,
        "rhyme's own sampler draws the tokens, one by one, with noise that repeats where a response is regenerated; "
        "this option replaces it",
        f"drop the first option, or use +rhyme=histospec with {_NO_DRAFTING}",
        (DRAFTING, BOUND),
    ),
    Row(
        (Option("rhyme.drafting.live_tokens", below_one_response, named_with=(PROMPT, RESPONSE)),),
        with_drafts,
        "the index of running texts does not hold one prompt with its response",
        f"drop it, or set {CONFIG_PATH}.drafting.live_tokens to at least their sum",
    ),
    Row(
        tuple(
            Option(
                f"{ENGINE}.{name}",
                differs_from(f"{ROLLOUT}.{key}"),
                f"set {ROLLOUT}.{key} instead",
                (f"{ROLLOUT}.{key}",),
            )
            for name, key in VERL_ROLLOUT_KEYS.items()
        ),
        with_rhyme,
        "verl and rhyme read this setting from verl's own key",
        f"set that key of {ROLLOUT} instead",
    ),
    Row(
        (
            Option(f"{ROLLOUT}.pipeline_model_parallel_size", several),
            Option(f"{ENGINE}.pipeline_parallel_size", several),
        ),
        with_rhyme,
        "verl runs vLLM with one pipeline stage",
        f"set it to 1, and raise {ROLLOUT}.tensor_model_parallel_size",
    ),
    Row(
        (Option("actor_rollout_ref.model.path", has_undrafted_layers),),
        with_drafts,
        recurrent.REASON,
        recurrent.REMEDY,
    ),
    Row(
        (Option(f"{ENGINE}.async_scheduling", counts_no_states),),
        with_drafts,
        "a synchronous engine continues recurrent layers wrongly after a skipped step",
        "drop the first option",
        ("actor_rollout_ref.model.path",),
    ),
    Row(
        (Option(f"{ROLLOUT}.data_parallel_size", several),),
        with_drafts,
        "drafts are not tested on data parallel engines, which take their steps together",
        f"set {ROLLOUT}.data_parallel_size=1 (verl then starts more replicas on the same GPUs), or "
        f"{CONFIG_PATH}.enable=false if a mixture-of-experts model requires data parallelism",
    ),
    Row(
        (Option(f"{ROLLOUT}.max_num_batched_tokens", below_drafts),),
        lambda run: run.drafting and adapters_in_engines(run),
        "vLLM with LoRA adapters needs room for a token and a draft token of each request in one step",
        f"set {MERGE}=true, raise the first option to twice the second, or lower the second",
        (SLOTS, MERGE),
    ),
    Row(
        (Option(BACKEND, lambda backend, run: backend == "delta_sharded"),),
        lambda run: run.rhyme is not None and trains_lora(run),
        "this backend sends the parameters that changed, and no LoRA adapters",
        f"set {BACKEND}=relay or nccl",
        (RANK,),
    ),
    Row(
        (
            Option(RANK, other_rank(MEGATRON_RANK, lambda run: run.megatron), f"set {MEGATRON_RANK} instead"),
            Option(
                MEGATRON_RANK,
                other_rank(RANK, lambda run: not run.megatron),
                f"set {RANK} instead",
            ),
            Option(ADAPTER, unread_adapter(megatron=False), f"also set {RANK}; with Megatron, {MEGATRON_ADAPTER}"),
            Option(MEGATRON_ADAPTER, unread_adapter(megatron=True), f"also set {MEGATRON_RANK}; with FSDP, {ADAPTER}"),
        ),
        with_rhyme,
        "this training engine reads another key, and without it trains all weights or a new adapter",
        "set the other key",
        (STRATEGY,),
    ),
    Row(
        (Option(f"{ACTOR}.megatron.vanilla_mbridge"),),
        lambda run: run.rhyme is not None and run.megatron and trains_lora(run),
        "verl trains adapters on Megatron with Megatron-Bridge only",
        f"set it to false and install Megatron-Bridge, or set {STRATEGY}=fsdp2",
        (MEGATRON_RANK, STRATEGY),
    ),
    Row(
        (Option(MANAGER, lambda manager, run: manager is None),),
        lambda run: run.rhyme is not None and not run.pipeline,
        f"options below {CONFIG_PATH} need a preset, which sets rhyme's agent loop manager",
        "add +rhyme=histospec",
    ),
    Row(
        (Option(MODE, lambda mode, run: str(mode) not in TOPOLOGIES),),
        with_pipeline,
        "the pipeline runs in verl's own trainer modes",
        f"set {MODE} to one of {', '.join(TOPOLOGIES)}, or {_VERLS_SCHEDULE}",
    ),
    Row(
        (Option(MANAGER, lambda manager, run: manager in (None, DRAFTING_MANAGER)),),
        with_pipeline,
        "the pipeline needs its own agent loop manager",
        f"use {_OTHERS}, which set it, without an override of it; or drop {CONFIG_PATH}.max_staleness",
    ),
    Row(
        (
            Option(
                f"{SEPARATE}.parameter_sync_step",
                lambda steps, run: run.topology == "separate" and int(steps or 1) != 1,
            ),
        ),
        with_pipeline,
        "each training step makes one policy version",
        f"set {SEPARATE}.parameter_sync_step=1",
    ),
    Row(
        (
            Option(
                f"{ROLLOUT}.scheduling_policy",
                lambda policy, run: policy != "priority",
                f"set {ROLLOUT}.scheduling_policy=priority",
            ),
            Option(f"{SEPARATE}.hybrid_rollout.enable_switch", lambda on, run: run.topology == "separate" and bool(on)),
            Option("trainer.v1.sampler.custom_sampler.path"),
            Option("skip.rollout_tq.enable"),
            Option(
                f"{ACTOR}.shuffle", remedy=f"drop it; {CONFIG_PATH}.scheduling.order=0 shuffles each training batch"
            ),
            Option(
                "data.gen_batch_size",
                lambda size, run: size not in (None, 1),
                f"drop it; {CONFIG_PATH}.scheduling.in_flight sets how many batches are loaded",
            ),
        ),
        with_pipeline,
        "the pipeline decides which prompts are loaded, where and in which order samples are generated, and which of "
        "them a training step takes",
        f"drop the first option, or {_VERLS_SCHEDULE}",
    ),
    Row(
        (
            Option(
                f"{QUEUE}.SimpleStorage.total_storage_size",
                lambda limit, run: limit is not None and run.value(f"{QUEUE}.storage_backend") == "SimpleStorage",
            ),
        ),
        with_pipeline,
        "samples above the limit would be lost",
        f"set {QUEUE}.SimpleStorage.total_storage_size=null (no limit)",
    ),
    Row(
        (
            Option(
                f"{ROLLOUT}.calculate_log_probs",
                lambda kept, run: not kept,
                f"set {ROLLOUT}.calculate_log_probs=true, or {CONFIG_PATH}.max_staleness=0",
            ),
            # "exact on-policy training" (arXiv:2505.23585)
            Option(ESTIMATOR, lambda estimator, run: estimator == "opo"),
            Option(
                LOSS,
                uncorrected,
                f"set {CORRECTION}.rollout_is=token and bypass_mode=false, or {CONFIG_PATH}.max_staleness=0",
            ),
        ),
        lambda run: run.stale,
        "stale tokens are corrected with the log-probabilities of the policy that sampled them; this setting leaves "
        "the correction out and is exact for on-policy tokens only",
        f"choose another value, or set {CONFIG_PATH}.max_staleness=0",
        (BOUND,),
    ),
    Row(
        (
            Option(f"{ACTOR}.checkpoint.async_save"),
            Option(f"{CRITIC}.async_save", lambda on, run: bool(on) and run.critic, named_with=(ESTIMATOR,)),
        ),
        with_rhyme,
        "verl's V1 trainer never completes an asynchronous checkpoint nor marks it as the latest: the next start would "
        "begin at step 0",
        "set it to false; FSDP saves synchronously in any case",
    ),
    Row(
        (
            Option(f"{ACTOR}.checkpoint.load_contents", loads_no_weights),
            Option(f"{CRITIC}.load_contents", lambda parts, run: run.critic and loads_no_weights(parts, run)),
        ),
        resumes,
        "a resumed run would continue the steps with the weights of the model folder",
        "add model to save_contents and load_contents",
        (RESUME,),
    ),
    Row(
        (
            Option(
                "trainer.default_hdfs_dir",
                lambda folder, run: folder is not None and not run.megatron,
                "drop it, and set trainer.default_local_dir to storage that outlives this machine",
            ),
            Option("trainer.default_local_dir", lambda folder, run: "://" in str(folder)),
        ),
        with_rhyme,
        "verl's V1 trainer saves and resumes below a mounted trainer.default_local_dir only, except that Megatron also "
        "copies its checkpoints to default_hdfs_dir",
        "set a folder on mounted storage",
        (STRATEGY,),
    ),
    Row(
        (Option("rhyme.scheduling.unit", splits_groups),),
        with_pipeline,
        "training trajectories one by one splits groups, but the estimator or the filter compares the samples of a "
        "group",
        f"set {CONFIG_PATH}.scheduling.unit=group",
        (ESTIMATOR, FILTER),
    ),
    Row(
        (
            Option(
                "rhyme.streaming.elastic.min_replicas",
                lambda least, run: run.rules is None or not run.rules.starts_through_training,
                named_with=(MODE, BOUND),
            ),
            Option(BACKEND, lambda name, run: bool(backend(str(name)).obstacle())),
        ),
        lambda run: run.rhyme is not None and run.rhyme.streaming.elastic.min_replicas is not None,
        "replicas can stop and return only on separate engines that generate during training, with a backend that "
        "sends weights to a single replica",
        f"set {MODE}=separate_async, max_staleness to at least 1 and {BACKEND}=relay or nccl, or drop "
        "streaming.elastic.min_replicas",
    ),
    Row(
        (
            Option(BACKEND, lambda backend, run: backend == "relay" and run.topology == "colocated"),
            Option(
                BACKEND,
                lambda backend, run: backend == "naive" and run.topology == "separate" and run.pipeline,
                f"set {BACKEND}=relay, nccl, nixl or mooncake",
            ),
        ),
        with_rhyme,
        "the relay sends weights to separate engines through shared memory; colocated engines take them from the actor "
        "(naive)",
        f"drop the override of the backend, or set {MODE}=separate_async",
        (MODE,),
    ),
    Row(
        (
            Option(
                PLACEMENT,
                lambda policy, run: policy is not None and not run.pipeline,
                f"set {CONFIG_PATH}.max_staleness, as {_OTHERS} do, or {CONFIG_PATH}.placement.policy=null",
                (BOUND,),
            ),
            Option(f"{ROLLOUT}.router_config_path", named_with=(PLACEMENT,)),
            Option(f"{ROLLOUT}.full_determinism", named_with=(PLACEMENT,)),
        ),
        lambda run: run.rhyme is not None and run.rhyme.placement.policy is not None,
        "a single router assigns requests to replicas: verl's, your own, or rhyme's, which uses the response lengths "
        "that the pipeline predicts",
        f"drop the first option, or set {CONFIG_PATH}.placement.policy=null",
    ),
    Row(
        (_POLICY_LOGPROBS,),
        lambda run: run.rhyme is not None and not run.rhyme.draws,
        "only rhyme's sampler knows this value, and without drafts or the pipeline vLLM's draws the tokens",
        f"drop the override of {ROLLOUT}.logprobs_mode",
        (DRAFTING,),
    ),
    Row(
        (
            Option(MANAGER, lambda manager, run: manager == PIPELINE_MANAGER),
            Option(BACKEND, lambda backend, run: backend == "relay"),
            _POLICY_LOGPROBS,
        ),
        lambda run: run.rhyme is None,
        f"this setting requires {CONFIG_PATH}.enable=true, which all presets except off set",
        "for stock verl, use +rhyme=off or no preset, and drop the override",
    ),
)


def refusals(config: Any, rhyme: RhymeConfig | None) -> Iterator[Check]:
    """Yield the options that :data:`TABLE` refuses, and contradictory rules; imports neither verl nor an engine."""
    rules = None
    try:
        rules = of_config(config, rhyme)
    except ValueError as error:
        yield Check("rhyme", FAIL, f"{CONFIG_PATH}: {error}")
    run = Run(config, rhyme, rules)
    for row, option in ((each, option) for each in TABLE if each.when(run) for option in each.options):
        if option.refused(run.value(option.key), run):
            keys = (option.key, *option.named_with, *row.named_with, *_NAMED.get(row.when, ()))
            settings = " with ".join(_setting(key, run.value(key)) for key in keys)
            yield Check("rhyme", FAIL, f"{settings}: {row.reason}", option.remedy or row.remedy)


def group_not_found(name: str) -> Check:
    """Return the finding of a ``+rhyme=name`` that hydra took for a plain value because it found no config group."""
    if name in PRESETS:
        remedy = "verl-rhyme is not installed in verl's environment (pip show verl-rhyme): install it there"
        return Check("rhyme", FAIL, f"+rhyme={name} did not find its config group", remedy)
    groups = " or ".join(f"+rhyme={preset}" for preset in PRESETS if preset != STOCK)
    return Check("rhyme", FAIL, f"+rhyme={name}: no such preset", f"use {groups}, or drop +rhyme for stock verl")


def _setting(key: str, value: Any) -> str:
    key = f"{CONFIG_PATH}{key.removeprefix('rhyme')}" if key.startswith("rhyme.") else key
    if OmegaConf.is_config(value):
        return key
    return f"{key}={str(value).lower() if isinstance(value, bool) else 'null' if value is None else value}"
