"""Table of the verl options that rhyme refuses, with reasons and remedies.

Start-up (:mod:`verl_rhyme.checks.startup`) and the preflight apply it; ``docs/combinations.md`` shows it.
Contradictions between rhyme's own options are refused where they are parsed: sections in :mod:`verl_rhyme.config`, the
pipeline's rules in :mod:`verl_rhyme.scheduling.rules`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.preflight import model_folder
from verl_rhyme.config import (
    CONFIG_PATH,
    PIPELINES,
    PRESETS,
    SINGLE_ESTIMATORS,
    TOPOLOGIES,
    RhymeConfig,
)
from verl_rhyme.config.presets import DRAFTING_MANAGER, MANAGER, PIPELINE_MANAGER, POLICY_LOGPROBS
from verl_rhyme.drafting import recurrent
from verl_rhyme.scheduling.rules import Rules, of_config

_ACTOR = "actor_rollout_ref.actor"
_CRITIC = "critic.checkpoint"
_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINE = f"{_ROLLOUT}.engine_kwargs.vllm"
_BACKEND = f"{_ROLLOUT}.checkpoint_engine.backend"
_MODE = "trainer.v1.trainer_mode"
_SEPARATE = "trainer.v1.separate_async"
_CORRECTION = "algorithm.rollout_correction"
_ESTIMATOR = "algorithm.adv_estimator"
_FILTER = "algorithm.filter_groups.enable"
_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
_DRAFTING = "rhyme.drafting.enable"
_BOUND = "rhyme.max_staleness"
_RESUME = "trainer.resume_mode"
_QUEUE = "transfer_queue.backend"
_PLACEMENT = "rhyme.placement.policy"
_PROMPT, _RESPONSE = "data.max_prompt_length", "data.max_response_length"
_MERGE = "actor_rollout_ref.model.lora.merge"
_SLOTS = f"{_ROLLOUT}.max_num_seqs"

#: vLLM options that verl sets from its own rollout keys; rhyme reads verl's keys.
VERL_ROLLOUT_KEYS = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "max_num_seqs": "max_num_seqs",
    "scheduling_policy": "scheduling_policy",
    "logprobs_mode": "logprobs_mode",
}

#: Values of ``algorithm.adv_estimator`` that are defined for on-policy samples only: OPO (arXiv:2505.23585: "exact
#: on-policy training") and ReMax (arXiv:2310.10505), whose baseline is the current policy's greedy response.
ON_POLICY_ESTIMATORS = ("opo", "remax")

#: Values of ``policy_loss.loss_mode`` without a ratio to the sampling policy: only ``rollout_is_weights`` correct them.
#: All other losses of verl 0.9.1 take ``old_log_probs``.
RATIO_FREE_LOSSES = ("gpg",)

#: Checkpoint-engine backends that send weights to all replicas at once only.
_ALL_AT_ONCE = ("kimi_ckpt_engine", "delta_sharded")


@dataclass(frozen=True)
class Run:
    """Configuration of a run, as the rows read it; ``rules`` are ``None`` also where options contradict each other."""

    config: Any
    rhyme: RhymeConfig | None
    rules: Rules | None

    def value(self, key: str) -> Any:
        """Return the value of ``key``, ``None`` if it is not set; the prefix ``rhyme.`` selects the rhyme tree."""
        prefix, _, ours = key.partition(".")
        if prefix == "rhyme":
            return functools.reduce(getattr, ours.split("."), self.rhyme)
        tree, _, option = key.rpartition(".")
        if tree != _ENGINE:
            return OmegaConf.select(self.config, key, throw_on_missing=True)
        # verl passes them to vLLM's command line, which also accepts dashes, abbreviations and subkeys (``a.b``).
        given = OmegaConf.select(self.config, tree, throw_on_missing=True) or {}
        named = ((str(name).replace("-", "_").partition(".")[0], value) for name, value in given.items())
        return next((value for name, value in named if name and option.startswith(name)), None)

    @property
    def topology(self) -> str | None:
        """``"colocated"``, ``"separate"``, or ``None`` for a user's own trainer."""
        return TOPOLOGIES.get(str(self.value(_MODE)))

    @property
    def megatron(self) -> bool:
        """Whether Megatron trains the actor."""
        return str(self.value(f"{_ACTOR}.strategy")) == "megatron"

    @property
    def critic(self) -> bool:
        """Whether a critic is trained, by verl's rule."""
        enabled = self.value("critic.enable")
        return self.value(_ESTIMATOR) == "gae" if enabled is None else bool(enabled)

    @property
    def drafting(self) -> bool:
        return self.rhyme is not None and self.rhyme.drafting.enable

    @property
    def pipeline(self) -> bool:
        return self.rhyme is not None and self.rhyme.pipeline

    @property
    def stale(self) -> bool:
        """Whether stale tokens are trained."""
        return self.rules is not None and self.rules.max_staleness > 0


@dataclass(frozen=True)
class Option:
    """A config key that a row checks.

    Attributes:
        key: Key of verl's config, or ``rhyme.`` and a key of the rhyme tree.
        refused: Predicate on the value and the run; by default, any true value is refused.
        remedy: Remedy that replaces the row's.
        named_with: Further keys that the refusal names.
    """

    key: str
    refused: Callable[[Any, Run], bool] = lambda value, run: bool(value)
    remedy: str = ""
    named_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """Options that are refused for the same reason.

    Attributes:
        options: Options, each refused independently of the others.
        when: Predicate on the runs that the row applies to.
        reason: Reason of the refusal.
        remedy: Remedy, unless the option has its own.
        named_with: Further keys that each refusal names.
    """

    options: tuple[Option, ...]
    when: Callable[[Run], bool]
    reason: str
    remedy: str
    named_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A refused setting: the problem in one line, and the remedy unless ``detail`` contains it."""

    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.detail, self.remedy)))


def _rhyme(run: Run) -> bool:
    return run.rhyme is not None


def _drafting(run: Run) -> bool:
    return run.drafting


def _pipeline(run: Run) -> bool:
    return run.pipeline


def _engine(*names: str) -> tuple[Option, ...]:
    return tuple(Option(f"{_ENGINE}.{name}") for name in names)


def _differs_from(key: str) -> Callable[[Any, Run], bool]:
    return lambda value, run: value is not None and value != run.value(key)


def _recurrent(path: Any, run: Run) -> bool:
    """Whether a local ``config.json`` declares recurrent layers; engines check the loaded model's layers as well."""
    file = model_folder.find(str(path))
    try:
        return file is not None and bool(recurrent.recurrent(model_folder.read(file)))
    except ValueError:  # the preflight's model check reports it
        return False


_POLICY_LOGPROBS = Option(f"{_ROLLOUT}.logprobs_mode", lambda mode, run: mode == POLICY_LOGPROBS)


def _below_one_response(tokens: int, run: Run) -> bool:
    prompt, response = run.value(_PROMPT), run.value(_RESPONSE)
    return None not in (prompt, response) and tokens < int(prompt) + int(response)


def _splits_groups(unit: str | None, run: Run) -> bool:
    """Whether trajectories are trained one by one although the estimator or filter compares a prompt's samples."""
    alone = run.rules is not None and run.rules.unit == "trajectory"
    return alone and (bool(run.value(_FILTER)) or run.value(_ESTIMATOR) not in SINGLE_ESTIMATORS)


def _uncorrected(loss: str | None, run: Run) -> bool:
    if loss == "bypass_mode":  # verl's V1 trainer gives this loss a separate correction config
        own = run.value("actor_rollout_ref.actor.policy_loss.rollout_correction") or {}
        return own.get("loss_type") == "reinforce" and not (own.get("rollout_is") or own.get("rollout_rs"))
    kinds = [run.value(f"{_CORRECTION}.{name}") for name in ("rollout_is", "rollout_rs")]
    return loss in RATIO_FREE_LOSSES and (bool(run.value(f"{_CORRECTION}.bypass_mode")) or not any(kinds))


def _resumes(run: Run) -> bool:
    return run.rhyme is not None and run.value(_RESUME) in ("auto", "resume_path")


def _loads_no_weights(parts: Any, run: Run) -> bool:
    """Whether a resume leaves the weights out; only Megatron loads ``hf_model``."""
    return parts is not None and "model" not in parts and not (run.megatron and "hf_model" in parts)


def _loads_unsaved(checkpoint: str) -> Callable[[Any, Run], bool]:
    """Whether a resume loads parts that are not saved: ``hf_model`` is ``model`` to Megatron, and nothing to FSDP."""

    def loads(parts: Any, run: Run) -> bool:
        saved = run.value(f"{checkpoint}.save_contents")
        same = {"hf_model": "model"} if run.megatron else {}
        wanted, found = ({same.get(part, part) for part in each or ()} for each in (parts, saved))
        return saved is not None and bool(wanted - found - {"hf_model"})

    return loads


def _lora(run: Run) -> bool:
    model = "actor_rollout_ref.model"
    return any(int(run.value(f"{model}.{key}") or 0) > 0 for key in ("lora_rank", "lora.rank"))


def _adapters_in_engines(run: Run) -> bool:
    return run.topology != "separate" and _lora(run) and not run.value(_MERGE)


def _below_drafts(tokens: int | None, run: Run) -> bool:
    assert run.rhyme is not None
    return int(tokens or 0) < int(run.value(_SLOTS) or 0) * (run.rhyme.drafting.max_tokens + 1)


def _elastic(run: Run) -> bool:
    return run.rhyme is not None and run.rhyme.streaming.elastic.min_replicas is not None


_VERLS_SCHEDULE = "use +rhyme=histospec (verl's own schedule)"
_OTHERS = " or ".join(f"+rhyme={name}" for name in PIPELINES)
_NO_DRAFTING = f"{CONFIG_PATH}.drafting.enable=false"

TABLE = (
    Row(
        (Option(f"{_ROLLOUT}.name", lambda name, run: name != "vllm"),),
        _rhyme,
        "rhyme drafts and schedules in vLLM only",
        f"set {_ROLLOUT}.name=vllm",
    ),
    Row(
        (Option("trainer.use_v1", lambda v1, run: v1 is not None and not v1),),
        _rhyme,
        "rhyme extends verl's V1 trainer",
        "set trainer.use_v1=true",
    ),
    Row(
        (Option(f"{_ROLLOUT}.disaggregation.enabled"), *_engine("kv_transfer_config")),
        _rhyme,
        "rhyme needs prefill and decoding in one engine",
        f"drop it, or set {CONFIG_PATH}.enable=false",
    ),
    Row(
        _engine("worker_extension_cls"),
        _rhyme,
        "rhyme has its own worker extension",
        f"drop it, or set {CONFIG_PATH}.enable=false",
    ),
    Row(
        _engine("config"),
        _rhyme,
        "rhyme reads all engine options from verl's config",
        f"move the options of that file to {_ENGINE}",
    ),
    Row(
        (
            *_engine("speculative_config", "spec_method", "spec_model", "spec_tokens"),
            Option(
                f"{_ROLLOUT}.mtp.enable_rollout",
                lambda mtp, run: bool(mtp and run.value(f"{_ROLLOUT}.mtp.enable")),
                f"set actor_rollout_ref.model.mtp.enable_rollout=false, or {_NO_DRAFTING}",
            ),
        ),
        _drafting,
        "vLLM takes one drafter, and rhyme's is in its place",
        f"drop the first option, or set {_NO_DRAFTING}",
        (_DRAFTING,),
    ),
    Row(
        _engine("async_scheduling", "scheduler_cls"),
        _drafting,
        "rhyme drafts in vLLM's synchronous scheduler",
        f"drop the first option, or set {_NO_DRAFTING}",
        (_DRAFTING,),
    ),
    Row(
        (
            *_engine("enable_dbo"),
            Option(f"{_ENGINE}.ubatch_size", lambda size, run: int(size or 0) > 1),
        ),
        _drafting,
        "rhyme's own sampler verifies whole batches",
        f"drop the first option, or set {_NO_DRAFTING}",
        (_DRAFTING,),
    ),
    Row(
        _engine("logits_processors", "diffusion_config"),
        lambda run: run.rhyme is not None and run.rhyme.draws,
        "rhyme's own sampler draws the tokens, one by one, with noise that repeats where a response is regenerated; "
        "this option replaces it",
        f"drop the first option, or use +rhyme=histospec with {_NO_DRAFTING}",
        (_DRAFTING, _BOUND),
    ),
    Row(
        (Option("rhyme.drafting.live_tokens", _below_one_response, named_with=(_PROMPT, _RESPONSE)),),
        _drafting,
        "the index of running texts does not hold one prompt with its response",
        f"drop it, or set {CONFIG_PATH}.drafting.live_tokens to at least their sum",
    ),
    Row(
        tuple(
            Option(
                f"{_ENGINE}.{name}",
                _differs_from(f"{_ROLLOUT}.{key}"),
                f"set {_ROLLOUT}.{key} instead",
                (f"{_ROLLOUT}.{key}",),
            )
            for name, key in VERL_ROLLOUT_KEYS.items()
        ),
        _rhyme,
        "verl and rhyme read this setting from verl's own key",
        f"set that key of {_ROLLOUT} instead",
    ),
    Row(
        (Option("actor_rollout_ref.model.path", _recurrent),),
        _drafting,
        recurrent.REASON,
        recurrent.REMEDY,
        (_DRAFTING,),
    ),
    # DPLBAsyncMPClient.call_utility_async returns the first engine's answer only: rhyme could not see that another
    # engine runs without its proposer or sampler, and would lose that engine's counts.
    Row(
        (Option(f"{_ROLLOUT}.data_parallel_size", lambda size, run: int(size or 1) > 1),),
        _drafting,
        "vLLM returns the answers of a replica's first engine only, so that rhyme cannot check the other ones",
        f"set {_ROLLOUT}.data_parallel_size=1 (verl then starts more replicas on the same GPUs), or "
        f"{CONFIG_PATH}.enable=false if a mixture-of-experts model requires data parallelism",
        (_DRAFTING,),
    ),
    Row(
        (Option(f"{_ROLLOUT}.max_num_batched_tokens", _below_drafts),),
        lambda run: run.drafting and _adapters_in_engines(run),
        "vLLM with LoRA adapters needs room for the draft tokens of all its requests in one step: "
        "max_num_seqs * (drafting.max_tokens + 1)",
        f"set {_MERGE}=true, raise the first option, or lower one of the others",
        (_SLOTS, "rhyme.drafting.max_tokens", _MERGE),
    ),
    Row(
        (Option(_BACKEND, lambda backend, run: backend == "delta_sharded"),),
        lambda run: run.rhyme is not None and _lora(run),
        "this backend sends the parameters that changed, and no LoRA adapters",
        f"set {_BACKEND}=relay or nccl",
        ("actor_rollout_ref.model.lora_rank",),
    ),
    Row(
        (Option(MANAGER, lambda manager, run: manager is None),),
        lambda run: run.rhyme is not None and not run.pipeline,
        f"options below {CONFIG_PATH} need a preset, which sets rhyme's agent loop manager",
        "add +rhyme=histospec",
    ),
    Row(
        (Option(_MODE, lambda mode, run: str(mode) not in TOPOLOGIES),),
        _pipeline,
        "the pipeline runs in verl's own trainer modes",
        f"set {_MODE} to one of {', '.join(TOPOLOGIES)}, or {_VERLS_SCHEDULE}",
        (_BOUND,),
    ),
    Row(
        (Option(MANAGER, lambda manager, run: manager in (None, DRAFTING_MANAGER)),),
        _pipeline,
        "the pipeline needs its own agent loop manager",
        f"use {_OTHERS}, which set it, without an override of it; or drop {CONFIG_PATH}.max_staleness",
        (_BOUND,),
    ),
    Row(
        (Option(f"{_ROLLOUT}.scheduling_policy", lambda policy, run: policy != "priority"),),
        _pipeline,
        "engines serve the samples in the order of the pipeline",
        f"set {_ROLLOUT}.scheduling_policy=priority",
        (_BOUND,),
    ),
    Row(
        (
            Option(
                f"{_SEPARATE}.parameter_sync_step",
                lambda steps, run: run.topology == "separate" and int(steps or 1) != 1,
            ),
        ),
        _pipeline,
        "each training step makes one policy version",
        f"set {_SEPARATE}.parameter_sync_step=1",
        (_BOUND,),
    ),
    Row(
        (Option(f"{_SEPARATE}.hybrid_rollout.enable_switch", lambda on, run: run.topology == "separate" and bool(on)),),
        _pipeline,
        "the pipeline decides which engines generate",
        f"set {_SEPARATE}.hybrid_rollout.enable_switch=false, or {_VERLS_SCHEDULE}",
        (_BOUND,),
    ),
    Row(
        (Option("trainer.v1.sampler.custom_sampler.path"), Option("skip.rollout_tq.enable")),
        _pipeline,
        "the pipeline decides which samples a training step takes",
        f"drop the first option, or {_VERLS_SCHEDULE}",
        (_BOUND,),
    ),
    Row(
        (Option("actor_rollout_ref.actor.shuffle"),),
        _pipeline,
        "the pipeline orders each training batch",
        f"drop it; {CONFIG_PATH}.scheduling.order=0 shuffles each training batch",
        (_BOUND,),
    ),
    Row(
        (Option("data.gen_batch_size", lambda size, run: size not in (None, 1)),),
        _pipeline,
        "the pipeline decides how many prompts are loaded",
        f"drop it; {CONFIG_PATH}.scheduling.in_flight sets how many batches are loaded",
        (_BOUND,),
    ),
    Row(
        (
            Option(
                f"{_QUEUE}.SimpleStorage.total_storage_size",
                lambda limit, run: limit is not None and run.value(f"{_QUEUE}.storage_backend") == "SimpleStorage",
            ),
        ),
        _pipeline,
        "samples above the limit would be lost",
        f"set {_QUEUE}.SimpleStorage.total_storage_size=null (no limit)",
        (_BOUND,),
    ),
    Row(
        (
            Option(
                f"{_ROLLOUT}.calculate_log_probs",
                lambda kept, run: not kept,
                f"set {_ROLLOUT}.calculate_log_probs=true, or {CONFIG_PATH}.max_staleness=0",
            ),
            Option(_ESTIMATOR, lambda estimator, run: estimator in ON_POLICY_ESTIMATORS),
            Option(
                _LOSS,
                _uncorrected,
                f"set {_CORRECTION}.rollout_is=token and bypass_mode=false, or {CONFIG_PATH}.max_staleness=0",
            ),
        ),
        lambda run: run.stale,
        "stale tokens are corrected with the log-probabilities of the policy that sampled them; this setting leaves "
        "the correction out and is exact for on-policy tokens only",
        f"choose another value, or set {CONFIG_PATH}.max_staleness=0",
        (_BOUND,),
    ),
    Row(
        (Option(f"{_ROLLOUT}.enable_rollout_routing_replay"),),
        lambda run: run.rules is not None and run.rules.continues,
        "the expert routing of a response that several policies or replicas generated cannot be replayed",
        f"set it to false, or {CONFIG_PATH}.scheduling.at_version=regenerate",
        (_BOUND,),
    ),
    Row(
        (
            Option(f"{_ACTOR}.checkpoint.async_save"),
            Option(f"{_CRITIC}.async_save", lambda on, run: bool(on) and run.critic, named_with=(_ESTIMATOR,)),
        ),
        _rhyme,
        "verl's V1 trainer never completes an asynchronous checkpoint nor marks it as the latest: the next start would "
        "begin at step 0",
        "set it to false; FSDP saves synchronously in any case",
    ),
    Row(
        (
            Option(f"{_ACTOR}.checkpoint.load_contents", _loads_no_weights),
            Option(f"{_CRITIC}.load_contents", lambda parts, run: run.critic and _loads_no_weights(parts, run)),
        ),
        _resumes,
        "a resumed run would continue the steps with the weights of the model folder",
        "add model to save_contents and load_contents",
        (_RESUME,),
    ),
    Row(
        (
            Option(f"{_ACTOR}.checkpoint.load_contents", _loads_unsaved(_ACTOR + ".checkpoint")),
            Option(
                f"{_CRITIC}.load_contents",
                lambda parts, run: run.critic and _loads_unsaved(_CRITIC)(parts, run),
            ),
        ),
        lambda run: _resumes(run) and run.value(_RESUME) == "auto",
        "a resumed run would not find these parts in its own checkpoints",
        "drop load_contents (it follows save_contents), or save the same parts",
        (_RESUME,),
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
        _rhyme,
        "verl's V1 trainer saves and resumes below a mounted trainer.default_local_dir only, except that Megatron also "
        "copies its checkpoints to default_hdfs_dir",
        "set a folder on mounted storage",
        (f"{_ACTOR}.strategy",),
    ),
    Row(
        (Option("rhyme.scheduling.unit", _splits_groups),),
        _pipeline,
        "training trajectories one by one splits groups, but the estimator or the filter compares the samples of a "
        "group",
        f"set {CONFIG_PATH}.scheduling.unit=group",
        (_ESTIMATOR, _FILTER),
    ),
    Row(
        (
            Option(
                "rhyme.streaming.elastic.min_replicas",
                lambda least, run: run.rules is None or not run.rules.starts_through_training,
                named_with=(_MODE, _BOUND),
            ),
            Option(_BACKEND, lambda backend, run: backend in _ALL_AT_ONCE),
        ),
        _elastic,
        "replicas can stop and return only on separate engines that generate during training, with a backend that "
        "sends weights to a single replica",
        f"set {_MODE}=separate_async, max_staleness to at least 1 and {_BACKEND}=relay or nccl, or drop "
        "streaming.elastic.min_replicas",
    ),
    Row(
        (
            Option(_BACKEND, lambda backend, run: backend == "relay" and run.topology == "colocated"),
            Option(
                _BACKEND,
                lambda backend, run: backend == "naive" and run.topology == "separate" and run.pipeline,
                f"set {_BACKEND}=relay, nccl, nixl or mooncake",
            ),
        ),
        _rhyme,
        "the relay sends weights to separate engines through shared memory; colocated engines take them from the actor "
        "(naive)",
        f"drop the override of the backend, or set {_MODE}=separate_async",
        (_MODE,),
    ),
    Row(
        (
            Option(
                _PLACEMENT,
                lambda policy, run: policy is not None and not run.pipeline,
                f"set {CONFIG_PATH}.max_staleness, as {_OTHERS} do, or {CONFIG_PATH}.placement.policy=null",
                (_BOUND,),
            ),
            Option(f"{_ROLLOUT}.router_config_path", named_with=(_PLACEMENT,)),
            Option(f"{_ROLLOUT}.full_determinism", named_with=(_PLACEMENT,)),
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
        f"drop the override of {_ROLLOUT}.logprobs_mode",
        (_DRAFTING,),
    ),
    Row(
        (
            Option(MANAGER, lambda manager, run: manager == PIPELINE_MANAGER),
            Option(_BACKEND, lambda backend, run: backend == "relay"),
            _POLICY_LOGPROBS,
        ),
        lambda run: run.rhyme is None,
        f"this setting requires {CONFIG_PATH}.enable=true, which all presets except off set",
        "for stock verl, use +rhyme=off or no preset, and drop the override",
    ),
)


def refusals(config: Any, rhyme: RhymeConfig | None) -> Iterator[Refusal]:
    """Yield the options that :data:`TABLE` refuses, and contradictory rules; imports neither verl nor an engine."""
    rules = None
    try:
        rules = of_config(config, rhyme)
    except ValueError as error:
        yield Refusal(f"{CONFIG_PATH}: {error}")
    run = Run(config, rhyme, rules)
    for row in TABLE:
        if not row.when(run):
            continue
        for option in row.options:
            if option.refused(run.value(option.key), run):
                keys = (option.key, *option.named_with, *row.named_with)
                settings = " with ".join(_setting(key, run.value(key)) for key in keys)
                yield Refusal(f"{settings}: {row.reason}", option.remedy or row.remedy)


def group_not_found(name: str) -> Refusal:
    """Return the refusal of a ``+rhyme=name`` that hydra took for a plain value because it found no config group."""
    if name in PRESETS:
        remedy = "verl-rhyme is not installed in verl's environment (pip show verl-rhyme): install it there"
    else:
        groups = " or ".join(f"+rhyme={preset}" for preset in PRESETS if preset != "off")
        return Refusal(f"+rhyme={name}: no such preset", f"use {groups}, or drop +rhyme for stock verl")
    return Refusal(f"+rhyme={name} did not find its config group", remedy)


def _setting(key: str, value: Any) -> str:
    key = f"{CONFIG_PATH}{key.removeprefix('rhyme')}" if key.startswith("rhyme.") else key
    if OmegaConf.is_config(value):
        return key
    return f"{key}={str(value).lower() if isinstance(value, bool) else 'null' if value is None else value}"
