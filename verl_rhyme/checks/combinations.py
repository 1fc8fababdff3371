"""What cannot go together, why, and what to set instead: the one table.

Start-up (:mod:`verl_rhyme.checks.startup`) and the preflight read it; ``docs/combinations.md`` shows it. What options
of ours exclude among themselves is refused where they are read: a section in :mod:`verl_rhyme.config`, the pipeline's
rules in :mod:`verl_rhyme.scheduling.rules`.
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
from verl_rhyme.config.presets import DRAFTING_MANAGER, MANAGER, PIPELINE_MANAGER
from verl_rhyme.drafting import recurrent
from verl_rhyme.scheduling.rules import Rules, of_config

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
_QUEUE = "transfer_queue.backend"
_PLACEMENT = "rhyme.placement.policy"

#: vLLM's options that verl sets from a key of its own, which rhyme reads.
VERLS = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "max_num_seqs": "max_num_seqs",
    "scheduling_policy": "scheduling_policy",
}

#: Values of ``algorithm.adv_estimator`` that are defined for samples of the current policy: OPO (arXiv:2505.23585:
#: "exact on-policy training"), and ReMax (arXiv:2310.10505), whose baseline is the current policy's greedy response.
ON_POLICY_ESTIMATORS = ("opo", "remax")

#: Values of ``policy_loss.loss_mode`` without a ratio to the policy that sampled: only ``rollout_is_weights`` correct
#: them. All others of verl 0.9.1 take ``old_log_probs``.
RATIO_FREE_LOSSES = ("gpg",)

#: Carriers of weights that send to all replicas at once only.
_ALL_AT_ONCE = ("kimi_ckpt_engine", "delta_sharded")


@dataclass(frozen=True)
class Run:
    """What the rows look at.

    Attributes:
        config: verl's whole config.
        rhyme: Our tree in it; ``None`` without rhyme.
        rules: The pipeline's; ``None`` without it, or where its options contradict each other.
    """

    config: Any
    rhyme: RhymeConfig | None
    rules: Rules | None

    def value(self, key: str) -> Any:
        """Of verl's config, or with ``rhyme.`` in front of ours, as typed; ``None`` for what is not set."""
        prefix, _, ours = key.partition(".")
        if prefix == "rhyme":
            return functools.reduce(getattr, ours.split("."), self.rhyme)
        tree, _, option = key.rpartition(".")
        if tree != _ENGINE:
            return OmegaConf.select(self.config, key, throw_on_missing=True)
        # verl hands them to vLLM's command line, which also takes dashes, beginnings, and a part of a tree (``a.b``).
        given = OmegaConf.select(self.config, tree, throw_on_missing=True) or {}
        named = ((str(name).replace("-", "_").partition(".")[0], value) for name, value in given.items())
        return next((value for name, value in named if name and option.startswith(name)), None)

    @property
    def topology(self) -> str | None:
        """``"colocated"``, ``"separate"``, or ``None`` under a trainer of somebody's own."""
        return TOPOLOGIES.get(str(self.value(_MODE)))

    @property
    def drafting(self) -> bool:
        return self.rhyme is not None and self.rhyme.drafting.enable

    @property
    def pipeline(self) -> bool:
        return self.rhyme is not None and self.rhyme.pipeline

    @property
    def stale(self) -> bool:
        """Tokens of earlier policies are trained."""
        return self.rules is not None and self.rules.max_staleness > 0


@dataclass(frozen=True)
class Option:
    """A key that a row looks at.

    Attributes:
        key: Of verl's config; with ``rhyme.`` in front of ours.
        refused: Whether this value of it is, in this run; by default whether it is set at all.
        remedy: Instead of the row's.
        beside: Keys that the refusal names as well.
    """

    key: str
    refused: Callable[[Any, Run], bool] = lambda value, run: bool(value)
    remedy: str = ""
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """What cannot go together for one reason.

    Attributes:
        options: Each is refused by itself.
        when: Of which runs the row speaks.
        reason: Why.
        remedy: What to do instead.
        beside: Keys that each refusal names as well.
    """

    options: tuple[Option, ...]
    when: Callable[[Run], bool]
    reason: str
    remedy: str
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """What of a config is refused, in one line, and how to mend it, in another, unless the first says that, too."""

    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.detail, self.remedy)))


def _rhyme(run: Run) -> bool:
    return run.rhyme is not None


def _engine(*names: str) -> tuple[Option, ...]:
    return tuple(Option(f"{_ENGINE}.{name}") for name in names)


def _differs_from(key: str) -> Callable[[Any, Run], bool]:
    return lambda value, run: value is not None and value != run.value(key)


def _recurrent(path: Any, run: Run) -> bool:
    """The model's ``config.json`` is on this machine and shows recurrent layers; engines look at all models' layers."""
    file = model_folder.find(str(path))
    try:
        return file is not None and bool(recurrent.recurrent(model_folder.read(file)))
    except ValueError:  # the preflight's model check reports it
        return False


def _uncoupled(coupled: bool | None, run: Run) -> bool:
    """Nothing is regenerated that could repeat itself."""
    return bool(coupled) and not (run.rules.redrafts if run.rules else run.pipeline)


def _torn(unit: str | None, run: Run) -> bool:
    """Trajectories are trained one by one, and something compares a prompt's samples."""
    alone = run.rules is not None and run.rules.unit == "trajectory"
    return alone and (bool(run.value(_FILTER)) or run.value(_ESTIMATOR) not in SINGLE_ESTIMATORS)


def _uncorrected(loss: str | None, run: Run) -> bool:
    if loss == "bypass_mode":  # verl's V1 trainer hands it options of its own
        own = run.value("actor_rollout_ref.actor.policy_loss.rollout_correction") or {}
        return own.get("loss_type") == "reinforce" and not (own.get("rollout_is") or own.get("rollout_rs"))
    kinds = [run.value(f"{_CORRECTION}.{name}") for name in ("rollout_is", "rollout_rs")]
    return loss in RATIO_FREE_LOSSES and (bool(run.value(f"{_CORRECTION}.bypass_mode")) or not any(kinds))


def _rests(run: Run) -> bool:
    return run.rhyme is not None and run.rhyme.streaming.elastic.min_replicas is not None


_OTHERS = " or ".join(f"+rhyme={name}" for name in PIPELINES)
_NO_DRAFTING = f"{CONFIG_PATH}.drafting.enable=false"

TABLE = (
    Row(
        (
            Option(f"{_ROLLOUT}.name", lambda name, run: name != "vllm", f"set {_ROLLOUT}.name=vllm"),
            Option("trainer.use_v1", lambda v1, run: v1 is not None and not v1, "drop it"),
            Option(f"{_ROLLOUT}.disaggregation.enabled"),
            *_engine("kv_transfer_config", "worker_extension_cls"),
            Option(f"{_ENGINE}.config", remedy=f"set the options that are in that file in {_ENGINE}"),
        ),
        _rhyme,
        "rhyme works with verl's V1 trainer and vllm: prefill and decoding in one engine, rhyme's own worker extension "
        "and options that can be read",
        f"drop it, or set {CONFIG_PATH}.enable=false",
    ),
    Row(
        (
            *_engine("speculative_config", "spec_method", "spec_model", "spec_tokens"),
            Option(
                f"{_ROLLOUT}.mtp.enable_rollout",
                lambda mtp, run: bool(mtp and run.value(f"{_ROLLOUT}.mtp.enable")),
                f"set actor_rollout_ref.model.mtp.enable_rollout=false, or {_NO_DRAFTING}",
            ),
            *_engine("async_scheduling", "scheduler_cls", "logits_processors", "enable_dbo"),
            Option(f"{_ENGINE}.ubatch_size", lambda size, run: int(size or 0) > 1),
            *_engine("diffusion_config"),
        ),
        lambda run: run.drafting,
        "rhyme drafts one next token after the other in vLLM's synchronous scheduler, and verifies whole steps in its "
        "own sampler; this puts something else there",
        f"drop the first, or set {_NO_DRAFTING}",
        (_DRAFTING,),
    ),
    Row(
        tuple(
            Option(
                f"{_ENGINE}.{name}",
                _differs_from(f"{_ROLLOUT}.{key}"),
                f"set {_ROLLOUT}.{key} instead",
                (f"{_ROLLOUT}.{key}",),
            )
            for name, key in VERLS.items()
        ),
        _rhyme,
        "verl and rhyme size replicas, slots and the order of requests by verl's own key",
        f"set that key of {_ROLLOUT} instead",
    ),
    Row(
        (Option("actor_rollout_ref.model.path", _recurrent),),
        lambda run: run.drafting,
        recurrent.REASON,
        recurrent.REMEDY,
        (_DRAFTING,),
    ),
    # vLLM answers a question to all workers with the first engine's answer (DPLBAsyncMPClient.call_utility_async): that
    # another one runs without our proposer or sampler would go unseen, and its counts would be lost.
    Row(
        (Option(f"{_ROLLOUT}.data_parallel_size", lambda size, run: int(size or 1) > 1),),
        lambda run: run.drafting,
        "vLLM shows the first of a replica's engines only",
        f"set {_ROLLOUT}.data_parallel_size=1: verl then makes that many times the replicas of the same GPUs; or set "
        f"{CONFIG_PATH}.enable=false (a mixture of experts that needs it for its experts)",
        (_DRAFTING,),
    ),
    Row(
        (Option("rhyme.sampling.coupled", _uncoupled),),
        _rhyme,
        "only a response that is regenerated, with its own text as draft, can repeat itself",
        "drop it: null couples wherever that is so",
        (_DRAFTING, _BOUND),
    ),
    Row(
        (
            Option(
                _MODE, lambda mode, run: str(mode) not in TOPOLOGIES, f"set {_MODE} to one of {', '.join(TOPOLOGIES)}"
            ),
            Option(
                MANAGER,
                lambda manager, run: manager in (None, DRAFTING_MANAGER),
                f"use {_OTHERS}, which set it, or drop {CONFIG_PATH}.max_staleness",
            ),
            Option(
                f"{_ROLLOUT}.scheduling_policy",
                lambda policy, run: policy != "priority",
                f"set {_ROLLOUT}.scheduling_policy=priority, as {_OTHERS} do",
            ),
            Option(
                f"{_SEPARATE}.parameter_sync_step",
                lambda steps, run: run.topology == "separate" and int(steps or 1) != 1,
                f"set {_SEPARATE}.parameter_sync_step=1, as {_OTHERS} do",
            ),
            Option(
                f"{_SEPARATE}.hybrid_rollout.enable_switch", lambda on, run: run.topology == "separate" and bool(on)
            ),
            Option("trainer.v1.sampler.custom_sampler.path"),
            Option("skip.rollout_tq.enable"),
            Option(
                "actor_rollout_ref.actor.shuffle",
                remedy=f"drop it; {CONFIG_PATH}.scheduling.order=0 shuffles an update",
            ),
            Option(
                "data.gen_batch_size",
                lambda size, run: size not in (None, 1),
                f"drop it; {CONFIG_PATH}.scheduling.in_flight says how much is loaded",
            ),
            Option(
                f"{_QUEUE}.SimpleStorage.total_storage_size",
                lambda limit, run: limit is not None and run.value(f"{_QUEUE}.storage_backend") == "SimpleStorage",
                f"set {_QUEUE}.SimpleStorage.total_storage_size=null (no limit), as {_OTHERS} do: a sample that finds "
                "no room would be lost",
            ),
        ),
        lambda run: run.pipeline,
        "the pipeline itself decides what is loaded and started, which engines generate it in which order, what an "
        "update trains, and that each update is a policy version",
        "drop the first, or use +rhyme=histospec (verl's own schedule)",
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
        "tokens of earlier policies are trained by the log-probabilities they were sampled with, and this goes "
        "without: it is exact for the current policy's own tokens only",
        f"choose another one, or set {CONFIG_PATH}.max_staleness=0",
        (_BOUND,),
    ),
    Row(
        (Option(f"{_ROLLOUT}.enable_rollout_routing_replay"),),
        lambda run: run.rules is not None and run.rules.continues,
        "the experts of a response that several policies, or replicas, made cannot be replayed",
        f"set it to false, or {CONFIG_PATH}.scheduling.at_version=regenerate",
        (_BOUND,),
    ),
    Row(
        (Option("rhyme.scheduling.unit", _torn),),
        lambda run: run.pipeline,
        "trajectories that are trained one by one tear groups apart, which the estimator or the filter compares",
        f"set {CONFIG_PATH}.scheduling.unit=group",
        (_ESTIMATOR, _FILTER),
    ),
    Row(
        (
            Option(
                "rhyme.streaming.elastic.min_replicas",
                lambda least, run: run.rules is None or not run.rules.starts_through_training,
                beside=(_MODE, _BOUND),
            ),
            Option(_BACKEND, lambda backend, run: backend in _ALL_AT_ONCE),
        ),
        _rests,
        "replicas rest where separate engines generate while the actor trains, and return with weights that they take "
        "alone",
        f"set {_MODE}=separate_async, max_staleness to at least 1 and {_BACKEND}=relay or nccl, or drop "
        "streaming.elastic.min_replicas",
    ),
    Row(
        (
            Option(_BACKEND, lambda backend, run: backend == "shm", f"set {_BACKEND}=relay"),
            Option(_BACKEND, lambda backend, run: backend == "relay" and run.topology == "colocated"),
            Option(
                _BACKEND,
                lambda backend, run: backend == "naive" and run.topology == "separate" and run.pipeline,
                f"set {_BACKEND}=relay, nccl, nixl or mooncake",
            ),
        ),
        _rhyme,
        "the relay carries weights through shared memory to separate engines; colocated ones take them from the actor "
        "(naive)",
        f"drop the override of the backend, or set {_MODE}=separate_async",
        (_MODE,),
    ),
    Row(
        (
            Option(
                _PLACEMENT,
                lambda policy, run: policy is not None and not run.pipeline,
                f"set {CONFIG_PATH}.max_staleness, as {_OTHERS} do, or placement.policy=null",
                (_BOUND,),
            ),
            Option(f"{_ROLLOUT}.router_config_path", beside=(_PLACEMENT,)),
            Option(f"{_ROLLOUT}.full_determinism", beside=(_PLACEMENT,)),
        ),
        lambda run: run.rhyme is not None and run.rhyme.placement.policy is not None,
        "one router places requests: verl's, your own, or ours by a placement, which goes by lengths that the pipeline "
        "expects",
        f"drop the first, or set {CONFIG_PATH}.placement.policy=null",
    ),
    Row(
        (
            Option(MANAGER, lambda manager, run: manager == PIPELINE_MANAGER),
            Option(_BACKEND, lambda backend, run: backend == "relay"),
        ),
        lambda run: run.rhyme is None,
        f"it needs {CONFIG_PATH}.enable=true, which all presets but off set",
        "for stock verl use +rhyme=off, or none, and drop the override",
    ),
)


def refusals(config: Any, rhyme: RhymeConfig | None) -> Iterator[Refusal]:
    """Those options that :data:`TABLE` refuses, and rules that contradict each other.

    Imports neither verl nor an engine.

    Args:
        config: verl's whole config.
        rhyme: Our tree in it; ``None`` without rhyme.
    """
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
                keys = (option.key, *option.beside, *row.beside)
                told = " with ".join(_told(key, run.value(key)) for key in keys)
                yield Refusal(f"{told}: {row.reason}", option.remedy or row.remedy)


def group_not_found(name: str) -> Refusal:
    """Of ``+rhyme=name`` that hydra took for a plain value: its config group was not there."""
    if name in PRESETS:
        remedy = "verl-rhyme is not installed beside verl (pip show verl-rhyme): install it there"
    else:
        groups = " or ".join(f"+rhyme={preset}" for preset in PRESETS if preset != "off")
        remedy = f"there is no such group; use {groups}, or nothing for stock verl"
    return Refusal(f"+rhyme={name} did not find its config group", remedy)


def _told(key: str, value: Any) -> str:
    key = f"{CONFIG_PATH}{key.removeprefix('rhyme')}" if key.startswith("rhyme.") else key
    if OmegaConf.is_config(value):
        return key
    return f"{key}={str(value).lower() if isinstance(value, bool) else 'null' if value is None else value}"
