"""What does not go together, why, and what to do instead: the one table, and the one list of systems.

Start-up (:mod:`verl_rhyme.startup`), the preflight and, of the list, the run scripts (``recipes/settings.sh``) read
them; ``docs/combinations.md`` shows them.  What one section of our tree excludes within itself is refused where that
is read (:mod:`verl_rhyme.config`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.config import CONFIG_PATH, LENGTH_PLACEMENTS, SINGLE_ESTIMATORS, TOPOLOGIES, RhymeConfig, sorting_unit
from verl_rhyme.drafting import recurrent
from verl_rhyme.preflight import model_folder

#: What ``+rhyme=histospec``, and ``+rhyme=sorted`` and all systems after it, set as :data:`MANAGER`.
DRAFTING_MANAGER = "verl_rhyme.workers.agent_loop.RhymeAgentLoopManager"
SORTED_MANAGER = "verl_rhyme.workers.agent_loop.SessionAgentLoopManager"
MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"

_ROLLOUT = "actor_rollout_ref.rollout"
_ENGINE = f"{_ROLLOUT}.engine_kwargs.vllm"
_MODE = "trainer.v1.trainer_mode"
_SEPARATE = "trainer.v1.separate_async"
_LIST = Path(__file__).with_name("conf") / "systems.txt"


@dataclass(frozen=True)
class System:
    """One value of the run scripts' ``RHYME``.

    Attributes:
        name: As in ``RHYME=name`` and, but for ``off``, ``+rhyme=name``.
        modes: The run scripts' ``MODE`` that it works with; ``None`` for any.
        what: In a few words.
    """

    name: str
    modes: tuple[str, ...] | None
    what: str


@functools.cache
def systems() -> Mapping[str, System]:
    """All of ``conf/systems.txt`` by name, in its order."""
    found = {}
    for line in _LIST.read_text().splitlines():
        if line and not line.startswith("#"):
            name, modes, what = line.split(maxsplit=2)
            found[name] = System(name, None if modes == "any" else tuple(modes.split(",")), what)
    return found


@dataclass(frozen=True)
class Combination:
    """A row of the table.

    Attributes:
        keys: What it looks at: keys of verl's config; ``rhyme.`` stands for ours, read as typed, with its defaults.
        refused: Whether these values, in the order of ``keys``, are refused; ``None`` for what is not set.
        reason: Why.
        remedy: What to do instead.
        rhyme: ``False`` for what is refused without rhyme (no tree, or ``enable=false``).
    """

    keys: tuple[str, ...]
    refused: Callable[..., bool]
    reason: str
    remedy: str
    rhyme: bool = True


@dataclass(frozen=True)
class Refusal:
    """What of a config is refused, in one line, and how to mend it, in another, unless the first says that, too."""

    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.detail, self.remedy)))


def _mixes(sorting: str | None, trainer: Any) -> bool:
    """A response may have tokens of several policies."""
    apart = TOPOLOGIES.get(str(trainer)) == "separate"
    return sorting == "partial" or (sorting in ("histopipe", "stream") and apart)


#: vLLM's options that verl sets from a key of its own, which rhyme reads.
VERLS = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "max_num_seqs": "max_num_seqs",
    "scheduling_policy": "scheduling_policy",
}


def _with_drafting(option: str, refused: Callable[[Any], bool], reason: str) -> Combination:
    """A row for an option of vLLM's that excludes drafting."""
    return Combination(
        (f"{_ENGINE}.{option}", "rhyme.drafting.enable"),
        lambda value, drafting: drafting and refused(value),
        reason,
        f"drop the first, or set {CONFIG_PATH}.drafting.enable=false",
    )


def _recurrent(path: Any) -> bool:
    """The model's ``config.json`` is on this machine and shows recurrent layers; engines look at all models' layers."""
    file = model_folder.find(str(path))
    try:
        return file is not None and bool(recurrent.recurrent(model_folder.read(file)))
    except ValueError:  # the preflight's model check reports it
        return False


TABLE = (
    Combination(
        (f"{_ROLLOUT}.name",),
        lambda engine: engine != "vllm",
        "rhyme works with vllm only",
        f"set {_ROLLOUT}.name=vllm",
    ),
    Combination(
        (f"{_ROLLOUT}.disaggregation.enabled",),
        bool,
        "rhyme does not work with prefill and decoding apart",
        "drop it",
    ),
    Combination(
        ("trainer.use_v1",),
        lambda v1: v1 is not None and not v1,
        "rhyme needs verl's V1 trainer",
        "drop it",
    ),
    *(
        _with_drafting(option, bool, "an engine drafts in one way")
        for option in ("speculative_config", "spec_method", "spec_model", "spec_tokens")
    ),
    Combination(
        (f"{_ROLLOUT}.mtp.enable", f"{_ROLLOUT}.mtp.enable_rollout", "rhyme.drafting.enable"),
        lambda mtp, rollout, ours: bool(mtp and rollout and ours),
        "an engine drafts in one way",
        f"set actor_rollout_ref.model.mtp.enable_rollout=false, or {CONFIG_PATH}.drafting.enable=false",
    ),
    _with_drafting("async_scheduling", bool, "vLLM would schedule a step before its drafts are known"),
    _with_drafting("scheduler_cls", bool, "drafts are known to be right with vLLM's synchronous scheduler only"),
    _with_drafting("logits_processors", bool, "vLLM applies no logits processors of your own to drafted positions"),
    *(
        _with_drafting(option, refused, "micro-batches of a step are not known to be right with drafts of many lengths")
        for option, refused in (("enable_dbo", bool), ("ubatch_size", lambda size: int(size or 0) > 1))
    ),
    _with_drafting("diffusion_config", bool, "a diffusion model has no next token to draft"),
    Combination(
        (f"{_ENGINE}.worker_extension_cls",),
        bool,
        "rhyme's own extension would be missing in the workers",
        f"drop it, or set {CONFIG_PATH}.enable=false",
    ),
    Combination(
        (f"{_ENGINE}.kv_transfer_config",),
        bool,
        "rhyme does not work with prefill and decoding apart",
        "drop it",
    ),
    Combination(
        (f"{_ENGINE}.config",),
        bool,
        "what vLLM reads from a file of options cannot be checked",
        f"set the options in {_ENGINE}",
    ),
    # verl and rhyme size replicas, slots and the order of requests by verl's keys.
    *(
        Combination(
            (f"{_ENGINE}.{option}", f"{_ROLLOUT}.{key}"),
            lambda theirs, verls: theirs is not None and theirs != verls,
            "verl and rhyme go by the second",
            f"set {_ROLLOUT}.{key} instead",
        )
        for option, key in VERLS.items()
    ),
    Combination(
        ("actor_rollout_ref.model.path", "rhyme.drafting.enable"),
        lambda path, drafting: drafting and _recurrent(path),
        recurrent.REASON,
        recurrent.REMEDY,
    ),
    # vLLM answers a question to all workers with the first engine's answer (DPLBAsyncMPClient.call_utility_async): that
    # another one runs without our proposer or sampler would go unseen, and its counts would be lost.
    Combination(
        (f"{_ROLLOUT}.data_parallel_size", "rhyme.drafting.enable"),
        lambda size, drafting: int(size or 1) > 1 and drafting,
        "vLLM lets us see the first of a replica's engines only",
        f"set {_ROLLOUT}.data_parallel_size=1: verl then makes that many times the replicas of the same GPUs; or set "
        f"{CONFIG_PATH}.enable=false (a mixture of experts that needs it for its experts)",
    ),
    Combination(
        ("rhyme.sampling.coupled", "rhyme.drafting.enable"),
        lambda coupled, drafting: coupled and not drafting,
        "coupling pays by verifying drafts of what was interrupted",
        f"set {CONFIG_PATH}.drafting.enable=true, or drop coupled",
    ),
    Combination(
        ("rhyme.sampling.coupled", "rhyme.sorting.mode"),
        lambda coupled, sorting: coupled and sorting != "on_policy",
        "only the sorted on-policy mode (+rhyme=sorted) generates anew what could repeat itself",
        "drop coupled",
    ),
    Combination(
        (_MODE, "rhyme.sorting.mode"),
        lambda trainer, sorting: sorting not in (None, "stream") and trainer not in TOPOLOGIES,
        f"sorting works in {' or '.join(TOPOLOGIES)} only (sync saves nothing of the samples in flight)",
        f"drop the override of {_MODE} (+rhyme=sorted and +rhyme=histopipe set rhyme_sorted), or set "
        f"{CONFIG_PATH}.sorting.mode=null",
    ),
    Combination(
        (_MODE, "rhyme.sorting.mode"),
        lambda trainer, sorting: trainer == "rhyme_sorted" and sorting is None,
        "this trainer mode is that of sorting",
        f"set {CONFIG_PATH}.sorting.mode=on_policy, partial or histopipe, as +rhyme=sorted and +rhyme=histopipe do, or "
        f"{_MODE} to one of verl's",
    ),
    Combination(
        (MANAGER, "rhyme.sorting.mode"),
        lambda manager, sorting: sorting is not None and manager in (None, DRAFTING_MANAGER),
        f"sorting needs {SORTED_MANAGER} there, or what derives from it",
        "drop the override: +rhyme=sorted, histopipe, stream and full set it",
    ),
    Combination(
        (_MODE, f"{_SEPARATE}.parameter_sync_step", "rhyme.sorting.mode"),
        lambda trainer, steps, sorting: sorting is not None and trainer == "separate_async" and int(steps or 1) != 1,
        "the scheduler counts a policy version at every update",
        f"set {_SEPARATE}.parameter_sync_step=1",
    ),
    Combination(
        (_MODE, f"{_SEPARATE}.hybrid_rollout.enable_switch", "rhyme.sorting.mode"),
        lambda trainer, switch, sorting: sorting is not None and trainer == "separate_async" and bool(switch),
        "the scheduler gives out samples for engines that stay",
        f"set {_SEPARATE}.hybrid_rollout.enable_switch=false",
    ),
    Combination(
        (_MODE, "rhyme.sorting.mode"),
        lambda trainer, sorting: sorting == "stream" and TOPOLOGIES.get(str(trainer)) != "separate",
        "what is streamed comes from engines apart from the actor, which go on while it trains",
        f"set {_MODE}=separate_async, as +rhyme=stream does, or {CONFIG_PATH}.sorting.mode=histopipe",
    ),
    Combination(
        (_MODE, "rhyme.streaming.enable", "rhyme.sorting.mode"),
        lambda trainer, streaming, sorting: (
            # of stream, and of a mode that sorting does not work in, the rows above say it
            streaming and (sorting is None or (sorting != "stream" and TOPOLOGIES.get(str(trainer)) == "colocated"))
        ),
        "a part is worked on while engines of their own go on, and a sorted rollout's scheduler says what is in it",
        f"set {_MODE}=separate_async and {CONFIG_PATH}.sorting.mode, as +rhyme=stream does, or drop streaming.enable",
    ),
    Combination(
        (_MODE, "rhyme.sorting.mode", "rhyme.sorting.max_staleness", "rhyme.streaming.elastic.enable"),
        lambda trainer, sorting, stale, elastic: (
            elastic and (trainer != "separate_async" or not _mixes(sorting, trainer) or not stale)
        ),
        "whether a replica more or less would do better shows where rollout goes on while the actor trains",
        f"set {_MODE}=separate_async with {CONFIG_PATH}.sorting.mode=stream, partial or histopipe and "
        "sorting.max_staleness at least 1, or drop streaming.elastic",
    ),
    Combination(
        (f"{_ROLLOUT}.checkpoint_engine.backend", "rhyme.streaming.elastic.enable"),
        lambda backend, elastic: elastic and backend in ("kimi_ckpt_engine", "delta_sharded"),
        "a replica that returns has to get the current weights alone, which this backend cannot send",
        f"set {_ROLLOUT}.checkpoint_engine.backend=relay or nccl, or drop streaming.elastic",
    ),
    Combination(
        (_MODE, "rhyme.sorting.mode", "rhyme.sorting.draft_ahead"),
        lambda trainer, sorting, ahead: ahead and (trainer, sorting) != ("separate_async", "on_policy"),
        "drafts are generated ahead where engines run on while the actor trains and what they say must not be trained",
        f"drop draft_ahead; it is for {_MODE}=separate_async with {CONFIG_PATH}.sorting.mode=on_policy (partial trains "
        "what is generated meanwhile)",
    ),
    Combination(
        (f"{_ROLLOUT}.checkpoint_engine.backend",),
        lambda backend: backend == "shm",
        "weights through shared memory are the relay's now",
        f"set {_ROLLOUT}.checkpoint_engine.backend=relay",
    ),
    Combination(
        (_MODE, f"{_ROLLOUT}.checkpoint_engine.backend"),
        lambda trainer, backend: backend == "relay" and trainer in ("sync", "colocate_async", "rhyme_sorted"),
        "engines on the GPUs that train take weights from the actor beside them: nothing is relayed",
        f"drop the backend, or set {_MODE}=separate_async",
    ),
    Combination(
        (_MODE, "rhyme.sorting.mode", f"{_ROLLOUT}.checkpoint_engine.backend", "rhyme.sorting.keep_running"),
        lambda trainer, sorting, backend, keep: (
            keep
            and (trainer, backend, sorting in ("partial", "histopipe", "stream")) != ("separate_async", "relay", True)
        ),
        "replicas must take new weights one by one, each when it is done with what it began under older ones",
        f"set {_MODE}=separate_async, {_ROLLOUT}.checkpoint_engine.backend=relay and {CONFIG_PATH}.sorting.mode="
        "partial, histopipe or stream, or drop keep_running",
    ),
    Combination(
        ("rhyme.sorting.draft_ahead", "rhyme.sorting.redraft", "rhyme.drafting.enable"),
        lambda ahead, redraft, drafting: ahead and not (redraft and drafting),
        "what is generated ahead is of use as a draft only",
        f"set {CONFIG_PATH}.sorting.redraft=true and {CONFIG_PATH}.drafting.enable=true, or drop draft_ahead",
    ),
    Combination(
        (
            "algorithm.adv_estimator",
            "algorithm.filter_groups.enable",
            "rhyme.sorting.mode",
            "rhyme.sorting.unit",
        ),
        lambda estimator, filtered, sorting, unit: (
            sorting is not None
            and sorting_unit(unit, str(estimator)) == "trajectory"
            and (bool(filtered) or estimator not in SINGLE_ESTIMATORS)
        ),
        "trajectories that are trained one by one tear groups apart, which the estimator or the filter compares",
        f"set {CONFIG_PATH}.sorting.unit=group",
    ),
    Combination(
        (f"{_ROLLOUT}.scheduling_policy", "rhyme.sorting.mode"),
        lambda policy, sorting: sorting is not None and policy != "priority",
        "more samples are given out than run, and without priorities the engines take them in any order",
        f"set {_ROLLOUT}.scheduling_policy=priority, as +rhyme=sorted, histopipe, stream and full do",
    ),
    Combination(
        (f"{_ROLLOUT}.enable_rollout_routing_replay", "rhyme.sorting.mode"),
        lambda replay, sorting: bool(replay) and sorting in ("partial", "histopipe", "stream"),
        "the experts of a response that several policies, or replicas, made cannot be replayed",
        f"set {_ROLLOUT}.enable_rollout_routing_replay=false, or {CONFIG_PATH}.sorting.mode=on_policy",
    ),
    Combination(
        (f"{_ROLLOUT}.calculate_log_probs", "rhyme.sorting.mode", _MODE),
        lambda logprobs, sorting, trainer: not logprobs and _mixes(sorting, trainer),
        "responses that span policies need the log-probabilities that tokens were made with",
        f"set {_ROLLOUT}.calculate_log_probs=true",
    ),
    Combination(
        ("trainer.v1.sampler.custom_sampler.path", "rhyme.sorting.mode"),
        lambda path, sorting: bool(path) and sorting is not None,
        "a sampler of your own is ignored: the scheduler decides what is sampled",
        f"set trainer.v1.sampler.custom_sampler.path=null, or {CONFIG_PATH}.sorting.mode=null",
    ),
    Combination(
        ("actor_rollout_ref.actor.shuffle", "rhyme.sorting.mode"),
        lambda shuffle, sorting: bool(shuffle) and sorting is not None,
        "shuffling undoes the order by length",
        f"set actor_rollout_ref.actor.shuffle=false, and {CONFIG_PATH}.sorting.order=0 for a shuffled batch",
    ),
    Combination(
        ("data.gen_batch_size", "rhyme.sorting.mode"),
        lambda size, sorting: sorting is not None and size not in (None, 1),
        "verl sets it to 1 outside of sync, and the scheduler says how many prompts are loaded",
        f"drop it; {CONFIG_PATH}.sorting.group_batches is what you want",
    ),
    Combination(
        ("skip.rollout_tq.enable", "rhyme.sorting.mode"),
        lambda skip, sorting: sorting is not None and bool(skip),
        "verl's skip of rollout is ignored: the scheduler starts and takes samples itself",
        f"set skip.rollout_tq.enable=false, or {CONFIG_PATH}.sorting.mode=null",
    ),
    Combination(
        ("rhyme.placement.policy", "rhyme.sorting.mode"),
        lambda policy, sorting: policy in LENGTH_PLACEMENTS and sorting is None,
        "it goes by forecasts of lengths, which the coordinator of a sorted rollout makes",
        f"use +rhyme=histopipe, sorted, stream or full, or set {CONFIG_PATH}.placement.policy=sticky_group",
    ),
    Combination(
        (f"{_ROLLOUT}.router_config_path", "rhyme.placement.policy"),
        lambda file, policy: bool(file) and policy is not None,
        "there is one router",
        f"drop the first, or set {CONFIG_PATH}.placement.policy=null",
    ),
    Combination(
        (f"{_ROLLOUT}.full_determinism", "rhyme.placement.policy"),
        lambda full, policy: bool(full) and policy is not None,
        "only verl's own router places requests deterministically",
        f"set {CONFIG_PATH}.placement.policy=null, or {_ROLLOUT}.full_determinism=false",
    ),
    Combination(
        (_MODE,),
        lambda mode: str(mode).startswith("rhyme_"),
        f"it needs {CONFIG_PATH}.enable=true, which +rhyme=sorted and +rhyme=histopipe set with it",
        "for stock verl drop +rhyme=sorted or +rhyme=histopipe",
        rhyme=False,
    ),
    Combination(
        (MANAGER,),
        lambda manager: manager == SORTED_MANAGER,
        f"it needs {CONFIG_PATH}.enable=true, which +rhyme=sorted, histopipe, stream and full set with it",
        "for stock verl drop +rhyme=sorted (or the system that is there)",
        rhyme=False,
    ),
    Combination(
        (f"{_ROLLOUT}.checkpoint_engine.backend",),
        lambda backend: backend == "relay",
        "the relay needs a trainer of verl-rhyme",
        "add +rhyme=histospec, sorted or histopipe (with enable=true), or set it to nccl, nixl or mooncake",
        rhyme=False,
    ),
)


def refusals(config: Any, rhyme: RhymeConfig | None) -> Iterator[Refusal]:
    """Those rows of :data:`TABLE` that a config meets; imports neither verl nor an engine.

    Args:
        config: verl's whole config.
        rhyme: Our tree in it; ``None`` without rhyme.
    """
    for row in TABLE:
        if row.rhyme != (rhyme is not None):
            continue
        values = [_value(config, rhyme, key) for key in row.keys]
        if row.refused(*values):
            told = " with ".join(_told(key, value) for key, value in zip(row.keys, values, strict=True))
            yield Refusal(f"{told}: {row.reason}", row.remedy)


def group_not_found(name: str) -> Refusal:
    """Of ``+rhyme=name`` that hydra took for a plain value: its config group was not there."""
    groups = [system for system in systems() if system != "off"]
    use = " or ".join(f"+rhyme={group}" for group in groups)
    if name in groups:
        remedy = "verl-rhyme is not installed beside verl (pip show verl-rhyme): install it there"
    else:
        remedy = f"there is no such group; use {use}, or nothing for stock verl"
    return Refusal(f"+rhyme={name} did not find its config group", remedy)


def _value(config: Any, rhyme: RhymeConfig | None, key: str) -> Any:
    prefix, _, ours = key.partition(".")
    if prefix == "rhyme":
        return functools.reduce(getattr, ours.split("."), rhyme)
    tree, _, option = key.rpartition(".")
    if tree != _ENGINE:
        return OmegaConf.select(config, key, throw_on_missing=True)
    # verl hands them to vLLM's command line, which also takes dashes, beginnings, and a part of a tree (``a.b``).
    given = OmegaConf.select(config, tree, throw_on_missing=True) or {}
    named = ((str(name).replace("-", "_").partition(".")[0], value) for name, value in given.items())
    return next((value for name, value in named if name and option.startswith(name)), None)


def _told(key: str, value: Any) -> str:
    key = f"{CONFIG_PATH}{key.removeprefix('rhyme')}" if key.startswith("rhyme.") else key
    if OmegaConf.is_config(value):
        return key
    return f"{key}={str(value).lower() if isinstance(value, bool) else 'null' if value is None else value}"
