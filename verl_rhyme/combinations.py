"""What does not go together, why, and what to do instead: the one table.

Start-up (:mod:`verl_rhyme.startup`) and the preflight read it; ``docs/combinations.md`` shows it.  What our tree
excludes within one of its sections is refused where that is read (:mod:`verl_rhyme.config`), rules of the pipeline that
contradict each other by :class:`~verl_rhyme.scheduling.rules.Rules`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.config import (
    CONFIG_PATH,
    LENGTH_PLACEMENTS,
    PRESETS,
    SINGLE_ESTIMATORS,
    TOPOLOGIES,
    RhymeConfig,
    trained_unit,
)
from verl_rhyme.config.presets import DRAFTING_MANAGER, MANAGER, PIPELINE_MANAGER
from verl_rhyme.drafting import recurrent
from verl_rhyme.preflight import model_folder

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"
_ENGINE = f"{_ROLLOUT}.engine_kwargs.vllm"
_MODE = "trainer.v1.trainer_mode"
_SEPARATE = "trainer.v1.separate_async"
_CORRECTION = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Run:
    """A config that the table looks at.

    Attributes:
        config: verl's whole config.
        rhyme: Our tree in it; ``None`` without rhyme (no tree, or ``enable=false``).
    """

    config: Any
    rhyme: RhymeConfig | None

    def get(self, key: str) -> Any:
        """The value of a key of verl's config; ``rhyme.`` stands for ours, as typed, with its defaults."""
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

    def told(self, key: str) -> str:
        """The key and its value, in words."""
        value = self.get(key)
        if key.startswith("rhyme."):
            key = f"{CONFIG_PATH}{key.removeprefix('rhyme')}"
        if OmegaConf.is_config(value):
            return key
        return f"{key}={str(value).lower() if isinstance(value, bool) else 'null' if value is None else value}"

    @property
    def pipeline(self) -> bool:
        return self.rhyme is not None and self.rhyme.pipeline

    @property
    def stale(self) -> bool:
        """Tokens of earlier policies are trained."""
        return self.pipeline and self.get("rhyme.max_staleness") > 0

    @property
    def topology(self) -> str | None:
        """Where engines and training live; ``None`` under a trainer of somebody's own."""
        return TOPOLOGIES.get(str(self.get(_MODE)))


@dataclass(frozen=True)
class When:
    """In which runs a row holds.

    Attributes:
        what: In words.
        holds: Whether it is one.
        told: Keys that say so in a refusal.
    """

    what: str
    holds: Callable[[Run], bool]
    told: tuple[str, ...] = ()


WITHOUT_RHYME = When("without rhyme", lambda run: run.rhyme is None)
WITH_RHYME = When("rhyme", lambda run: run.rhyme is not None)
DRAFTS = When("drafting", lambda run: run.rhyme is not None and run.rhyme.drafting.enable, ("rhyme.drafting.enable",))
PIPELINE = When("the pipeline", lambda run: run.pipeline, ("rhyme.max_staleness",))
STALE = When("the pipeline above `max_staleness=0`", lambda run: run.stale, ("rhyme.max_staleness",))
ONE_BY_ONE = When(
    "the pipeline, trajectories trained one by one",
    lambda run: (
        run.pipeline
        and trained_unit(run.get("rhyme.scheduling.unit"), str(run.get("algorithm.adv_estimator"))) == "trajectory"
    ),
    ("rhyme.scheduling.unit",),
)
NOT_BESIDE_TRAINING = When(
    "but separate engines above `max_staleness=0`",
    lambda run: run.rhyme is not None and not (run.stale and run.topology == "separate"),
    (_MODE, "rhyme.max_staleness"),
)
NO_PIPELINE = When(
    "verl's own schedule", lambda run: run.rhyme is not None and not run.pipeline, ("rhyme.max_staleness",)
)
PLACED = When(
    "a placement policy",
    lambda run: run.rhyme is not None and run.rhyme.placement.policy is not None,
    ("rhyme.placement.policy",),
)


@dataclass(frozen=True)
class Key:
    """One that a row looks at.

    Attributes:
        wrong: Whether its value (``None`` where it is not set) is refused.
        mend: What to do instead.
    """

    wrong: Callable[[Any, Run], bool]
    mend: str = "drop it"


@dataclass(frozen=True)
class Combination:
    """A row of the table: any of its keys with a wrong value is refused.

    Attributes:
        keys: By name, as :meth:`Run.get` has it.
        when: In which runs.
        reason: Why.
        otherwise: What else to do, whichever key it is.
    """

    keys: Mapping[str, Key]
    when: When
    reason: str
    otherwise: str = ""


@dataclass(frozen=True)
class Refusal:
    """What of a config is refused, in one line, and how to mend it, in another, unless the first says that, too."""

    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.detail, self.remedy)))


def _on(value: Any, run: Run) -> bool:
    return bool(value)


def _is_set(value: Any, run: Run) -> bool:
    return value is not None


def _but(*allowed: Any) -> Callable[[Any, Run], bool]:
    return lambda value, run: value not in allowed


#: vLLM's options that verl sets from a key of its own, which rhyme reads.
VERLS = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "max_num_seqs": "max_num_seqs",
    "scheduling_policy": "scheduling_policy",
}


def _differs(verls: str) -> Callable[[Any, Run], bool]:
    return lambda value, run: value is not None and value != run.get(f"{_ROLLOUT}.{verls}")


def _recurrent(path: Any, run: Run) -> bool:
    """The model's ``config.json`` is on this machine and shows recurrent layers; engines look at all models' layers."""
    file = model_folder.find(str(path))
    try:
        return file is not None and bool(recurrent.recurrent(model_folder.read(file)))
    except ValueError:  # the preflight's model check reports it
        return False


def _cannot_carry(backend: Any, run: Run) -> bool:
    elastic = run.rhyme is not None and run.rhyme.streaming.elastic.min_replicas is not None
    return (
        backend == "shm"
        or (backend == "relay" and run.topology == "colocated")
        or (backend == "naive" and run.topology == "separate" and run.pipeline)
        or (backend in ("kimi_ckpt_engine", "delta_sharded") and elastic)
    )


def _without_ratio(loss: Any, run: Run) -> bool:
    """No ratio of the loss's own to the policy that sampled, and no weight of verl's that has one."""
    if loss == "bypass_mode":
        own = run.get(f"{_ACTOR}.policy_loss.rollout_correction") or {}
        return own.get("loss_type") == "reinforce" and not own.get("rollout_is")
    # with bypass_mode verl computes no weights
    weighted = run.get(f"{_CORRECTION}.rollout_is") and not run.get(f"{_CORRECTION}.bypass_mode")
    return loss == "gpg" and not weighted


TABLE = (
    Combination(
        {
            f"{_ROLLOUT}.name": Key(_but("vllm"), f"set {_ROLLOUT}.name=vllm"),
            "trainer.use_v1": Key(_but(None, True), "drop it: rhyme needs verl's V1 trainer"),
            f"{_ROLLOUT}.disaggregation.enabled": Key(_on),
            f"{_ENGINE}.kv_transfer_config": Key(_on),
            f"{_ENGINE}.worker_extension_cls": Key(_on, "drop it: rhyme's own would be missing in the workers"),
            f"{_ENGINE}.config": Key(_on, f"set in {_ENGINE} what is in the file, which cannot be checked"),
        },
        WITH_RHYME,
        "rhyme works with verl's V1 trainer and vllm only, prefill and decoding together, in workers of its own",
        f"set {CONFIG_PATH}.enable=false",
    ),
    # verl and rhyme size replicas, slots and the order of requests by verl's keys.
    Combination(
        {f"{_ENGINE}.{option}": Key(_differs(key), f"set {_ROLLOUT}.{key} instead") for option, key in VERLS.items()},
        WITH_RHYME,
        "verl sets it from a key of its own, by which rhyme goes, too",
    ),
    Combination(
        {
            **dict.fromkeys(
                (
                    f"{_ENGINE}.{option}"
                    for option in (
                        "speculative_config",
                        "spec_method",
                        "spec_model",
                        "spec_tokens",
                        "async_scheduling",
                        "scheduler_cls",
                        "logits_processors",
                        "enable_dbo",
                        "diffusion_config",
                    )
                ),
                Key(_on),
            ),
            f"{_ENGINE}.ubatch_size": Key(lambda size, run: int(size or 0) > 1),
            f"{_ROLLOUT}.mtp.enable_rollout": Key(
                lambda on, run: bool(on and run.get(f"{_ROLLOUT}.mtp.enable")),
                "set actor_rollout_ref.model.mtp.enable_rollout=false",
            ),
        },
        DRAFTS,
        "an engine drafts in one way, and drafts are known to be right with vLLM's synchronous scheduler and its own "
        "sampling of whole steps only",
        f"set {CONFIG_PATH}.drafting.enable=false",
    ),
    Combination(
        {"actor_rollout_ref.model.path": Key(_recurrent, recurrent.REMEDY)},
        DRAFTS,
        recurrent.REASON,
    ),
    # vLLM answers a question to all workers with the first engine's answer (DPLBAsyncMPClient.call_utility_async): that
    # another one runs without our proposer or sampler would go unseen, and its counts would be lost.
    Combination(
        {
            f"{_ROLLOUT}.data_parallel_size": Key(
                lambda size, run: int(size or 1) > 1,
                f"set {_ROLLOUT}.data_parallel_size=1: verl then makes that many times the replicas of the same GPUs",
            )
        },
        DRAFTS,
        "vLLM lets us see the first of a replica's engines only",
        f"set {CONFIG_PATH}.enable=false (a mixture of experts that needs it for its experts)",
    ),
    Combination(
        {
            "rhyme.sampling.coupled": Key(
                lambda coupled, run: (
                    bool(coupled) and not (run.rhyme.drafting.enable and run.rhyme.max_staleness == 0)  # type: ignore[union-attr]
                )
            )
        },
        When("rhyme", WITH_RHYME.holds, ("rhyme.max_staleness", "rhyme.drafting.enable")),
        "coupling pays by verifying drafts of what the on-policy pipeline (max_staleness=0) generates again",
    ),
    Combination(
        {
            _MODE: Key(lambda mode, run: run.topology is None, f"set {_MODE} to one of {', '.join(TOPOLOGIES)}"),
            MANAGER: Key(
                lambda manager, run: manager in (None, DRAFTING_MANAGER),
                f"set {PIPELINE_MANAGER}, or what derives from it",
            ),
            f"{_ROLLOUT}.scheduling_policy": Key(_but("priority"), f"set {_ROLLOUT}.scheduling_policy=priority"),
            "trainer.v1.sampler.custom_sampler.path": Key(_on),
            "skip.rollout_tq.enable": Key(_on),
            "data.gen_batch_size": Key(_but(None, 1), f"drop it; {CONFIG_PATH}.scheduling.in_flight is what you want"),
            f"{_ACTOR}.shuffle": Key(_on, f"drop it; {CONFIG_PATH}.scheduling.order=0 shuffles"),
            f"{_SEPARATE}.parameter_sync_step": Key(
                lambda steps, run: run.topology == "separate" and int(steps or 1) != 1,
                f"set {_SEPARATE}.parameter_sync_step=1: an update is a policy version",
            ),
            f"{_SEPARATE}.hybrid_rollout.enable_switch": Key(
                lambda switch, run: run.topology == "separate" and bool(switch)
            ),
        },
        PIPELINE,
        "its scheduler decides what starts, where, in which order, and what an update trains: this would go past it, "
        "or be ignored",
        "use a preset with the pipeline as it is, or set max_staleness=null for verl's own schedule",
    ),
    Combination(
        {
            f"{_ROLLOUT}.calculate_log_probs": Key(
                lambda on, run: not on, f"set {_ROLLOUT}.calculate_log_probs=true: by them stale tokens are weighted"
            ),
            f"{_ROLLOUT}.enable_rollout_routing_replay": Key(
                _on, "drop it: experts of a response of several policies cannot be replayed"
            ),
            f"{_ACTOR}.policy_loss.loss_mode": Key(
                _without_ratio, f"set {_CORRECTION}.rollout_is=token and bypass_mode=false, or another loss"
            ),
        },
        STALE,
        "tokens of earlier policies are trained, each to be corrected for by the policy that it was sampled with",
        f"set {CONFIG_PATH}.max_staleness=0",
    ),
    Combination(
        {
            "algorithm.adv_estimator": Key(_but(*SINGLE_ESTIMATORS)),
            "algorithm.filter_groups.enable": Key(_on),
        },
        ONE_BY_ONE,
        "that tears groups apart, which the estimator or the filter compares",
        f"set {CONFIG_PATH}.scheduling.unit=group",
    ),
    Combination(
        {f"{_ROLLOUT}.checkpoint_engine.backend": Key(_cannot_carry)},
        WITH_RHYME,
        "weights go by relay (or nccl, nixl, mooncake) to engines of their own, by naive to those on the GPUs that "
        "train; kimi_ckpt_engine and delta_sharded cannot send them to one replica that returns (streaming.elastic)",
        f"set {_MODE} to what it is for",
    ),
    Combination(
        {"rhyme.streaming.elastic.min_replicas": Key(_is_set)},
        NOT_BESIDE_TRAINING,
        "whether a replica more or less would do better shows where rollout goes on while the actor trains",
        f"set {_MODE}=separate_async and {CONFIG_PATH}.max_staleness to at least 1",
    ),
    Combination(
        {
            "rhyme.placement.policy": Key(
                lambda policy, run: policy in LENGTH_PLACEMENTS, f"set {CONFIG_PATH}.placement.policy=sticky_group"
            )
        },
        NO_PIPELINE,
        "it goes by expected lengths, which the pipeline's coordinator has",
        f"set {CONFIG_PATH}.max_staleness (+rhyme=full)",
    ),
    Combination(
        {
            f"{_ROLLOUT}.router_config_path": Key(_on),
            f"{_ROLLOUT}.full_determinism": Key(_on),
        },
        PLACED,
        "there is one router, and only verl's own places requests deterministically",
        f"set {CONFIG_PATH}.placement.policy=null",
    ),
    Combination(
        {
            MANAGER: Key(
                lambda manager, run: manager == PIPELINE_MANAGER,
                "drop +rhyme=full (or the preset that is there) for stock verl",
            ),
            f"{_ROLLOUT}.checkpoint_engine.backend": Key(
                lambda backend, run: backend == "relay", "set it to nccl, nixl or mooncake"
            ),
        },
        WITHOUT_RHYME,
        "it needs a trainer of verl-rhyme",
        f"add +rhyme=PRESET with {CONFIG_PATH}.enable=true",
    ),
)


def refusals(config: Any, rhyme: RhymeConfig | None) -> Iterator[Refusal]:
    """What of a config a row of :data:`TABLE` refuses; imports neither verl nor an engine.

    Args:
        config: verl's whole config.
        rhyme: Our tree in it; ``None`` without rhyme.
    """
    run = Run(config, rhyme)
    for row in TABLE:
        if not row.when.holds(run):
            continue
        for name, key in row.keys.items():
            if key.wrong(run.get(name), run):
                told = " with ".join(run.told(each) for each in (name, *row.when.told))
                yield Refusal(f"{told}: {row.reason}", ", or ".join(filter(None, (key.mend, row.otherwise))))


def group_not_found(name: str) -> Refusal:
    """Of ``+rhyme=name`` that hydra took for a plain value: its config group was not there."""
    use = " or ".join(f"+rhyme={preset}" for preset in PRESETS if preset != "off")
    if name in PRESETS:
        remedy = "verl-rhyme is not installed beside verl (pip show verl-rhyme): install it there"
    else:
        remedy = f"there is no such group; use {use}, or nothing for stock verl"
    return Refusal(f"+rhyme={name} did not find its config group", remedy)
