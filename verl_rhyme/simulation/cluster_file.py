"""A cluster and what it runs, from a YAML file (``verl-rhyme simulate``).

Keys and types are those of :mod:`verl_rhyme.simulation.cluster_keys`; a replica's profile is a file of its own
(:mod:`verl_rhyme.simulation.profile`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf.errors import MissingMandatoryValue

from verl_rhyme.config import CONFIG_PATH, ConfigError, PlacementConfig, StreamingConfig
from verl_rhyme.scheduling.cost import ReplicaCost, TrainingCost
from verl_rhyme.scheduling.placement import Placement
from verl_rhyme.scheduling.rules import Rules, named
from verl_rhyme.simulation import recorded
from verl_rhyme.simulation.cluster_keys import ClusterFile, DraftsFile, PlacementFile, RulesFile, WorkloadFile
from verl_rhyme.simulation.profile import profile
from verl_rhyme.simulation.scenario import Drafts, Scenario, Streaming
from verl_rhyme.simulation.typed_yaml import ClusterError, by_percentile, from_folder_of, read
from verl_rhyme.simulation.workload import Lengths, Prompt

#: What numbers must be at least, by key; all are finite.
_LEAST = {
    "limit": 1,
    "updates": 1,
    "rules.batch_prompts": 1,
    "rules.group_batches": 1,
    "rules.max_staleness": 0,
    "workload.prompts": 1,
    "workload.samples": 1,
    "workload.epochs": 1,
    "workload.prompt_tokens": 1,
    "workload.response_limit": 1,
    "workload.growth": 0,
    "workload.seed": 0,
    "drafts.overhead": 1,
    "drafts.siblings": 0,
}

_LEFT_OPEN = ("load", "group_batches", "harvest", "max_staleness")
#: Of these a mode has its own.
_FIXED = {"sync": _LEFT_OPEN, "on_policy": ("max_staleness",), "histopipe": _LEFT_OPEN, "partial": ()}
_FIXED |= {"stream": ("load", "group_batches", "harvest")}


@dataclass(frozen=True)
class Loaded:
    """What is to be simulated.

    Attributes:
        scenario: Cluster and rules.
        prompts: In the order of the loader.
        updates: Update batches that they make, or fewer where the file says so.
        sources: Of the profiles' figures.
        epoch_prompts: Prompts of an epoch.
        total: Prompts of all epochs.
        unread: What of a recorded run's log was not read, or is not played.
    """

    scenario: Scenario
    prompts: Iterable[Prompt]
    updates: int
    sources: list[str]
    epoch_prompts: int
    total: int
    unread: list[str] = field(default_factory=list)


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a cluster file.

    Args:
        path: Of the YAML.
        overrides: ``key.in.it=value``; an element of a list has its number as key, from 0 on.

    Raises:
        ClusterError: It cannot be read, or says what cannot be.
    """
    config: ClusterFile = read(ClusterFile, path, overrides)
    try:
        _check_bounds(config, path)
        return _scenario(config, path)
    except ClusterError:
        raise
    except MissingMandatoryValue as error:
        raise ClusterError(f"{path}: {error.full_key or error} is missing") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ClusterError(f"{path}: {error}") from error


def _check_bounds(config: ClusterFile, path: Path) -> None:
    told: list[tuple[str, float | None, float]] = [
        (key, operator.attrgetter(key)(config), least) for key, least in _LEAST.items()
    ]
    for i, kind in enumerate(config.replicas):
        told += [(f"replicas.{i}.{name}", getattr(kind, name), 1) for name in ("count", "slots")]
        if kind.room != math.inf:
            told.append((f"replicas.{i}.room", kind.room, 1))
    if config.drafts.acceptance == []:
        raise ClusterError(
            f"{path}: drafts.acceptance is empty: name a pace for each epoch, such as [1, 2], or drop it"
        )
    told += [(f"drafts.acceptance.{i}", pace, 1) for i, pace in enumerate(config.drafts.acceptance or [])]
    told += [(f"workload.percentiles.{p}", tokens, 1) for p, tokens in (config.workload.percentiles or {}).items()]
    for key, value, least in told:
        if value is not None and not least <= value < math.inf:
            bound = "finite" if value == math.inf else f"at least {least}"
            raise ClusterError(f"{path}: {key} must be {bound}, not {value}")


def _scenario(config: ClusterFile, path: Path) -> Loaded:
    costs: list[ReplicaCost] = []
    sources, rooms = [], []
    for kind in config.replicas:
        cost, source, *_ = profile(kind.profile, path)
        slots = cost.slots if kind.slots is None else kind.slots
        room = cost.room if kind.room is None else kind.room
        costs += [ReplicaCost(cost.step, cost.prefill, slots, room, cost.gpus)] * kind.count
        rooms.append(room)
        if source not in sources:
            sources.append(source)
    if not costs:
        raise ClusterError(f"{path}: replicas is empty: name at least one kind")
    if config.forecasts == "none" and config.rules.start_order != "load":
        raise ClusterError(
            f"{path}: rules.start_order={config.rules.start_order} needs forecasts: set forecasts to history or "
            "oracle, or drop it"
        )
    for name, value, values in (
        ("topology", config.topology, ("colocated", "separate")),
        ("forecasts", config.forecasts, ("history", "oracle", "none")),
    ):
        if value not in values:
            raise ClusterError(f"{path}: {name} must be {', '.join(values)}, not {value!r}")
    if config.ranker is not None and (not 0 < config.ranker <= 1 or config.forecasts != "history"):
        raise ClusterError(
            f"{path}: ranker={config.ranker} with forecasts={config.forecasts}: a ranker is a rank correlation, above "
            "0 and at most 1, and goes with forecasts=history"
        )
    work = _recorded(config, path) if config.workload.lengths.run is not None else _made_up(config, path)
    if small := [i for i, kind in enumerate(rooms) if kind < work.largest]:
        raise ClusterError(
            f"{path}: replicas.{small[0]} has room for {rooms[small[0]]:.0f} tokens, and a request may have "
            f"{work.largest}: set replicas.{small[0]}.room, or shorten the workload"
        )
    updates = work.total // config.rules.batch_prompts
    if not updates:
        raise ClusterError(
            f"{path}: its {work.total} prompts are fewer prompts than rules.batch_prompts={config.rules.batch_prompts}"
        )
    updates = updates if config.updates is None else min(updates, config.updates)
    _check_placement(config.placement, path)
    rules = _rules(config.rules, work.samples, config.topology == "separate", path)
    scenario = Scenario(
        replicas=tuple(costs),
        rules=rules,
        training=TrainingCost(**vars(config.training)),
        streaming=_streaming(config, rules, path),
        colocated=config.topology == "colocated",
        placement=config.placement.policy,
        options=dict(config.placement.options),
        drafts=work.drafts,
        limit=config.limit,
        lot=1
        if config.limit is None
        else max(1, (config.limit - sum(cost.slots for cost in costs)) // 2),  # training's
        forecasts=config.forecasts,  # type: ignore[arg-type]
        response_limit=work.response_limit,
        ranker=config.ranker,
    )
    return Loaded(scenario, work.prompts, updates, sources, work.epoch_prompts, work.total, work.unread)


class _Work(NamedTuple):
    """``total`` prompts over all epochs, of so many samples each, of which none has more than ``largest`` tokens."""

    prompts: Iterable[Prompt]
    total: int
    epoch_prompts: int
    samples: int
    response_limit: int
    largest: int
    drafts: Drafts
    unread: list[str]


def _made_up(config: ClusterFile, path: Path) -> _Work:
    work = config.workload
    if work.prompts is None or work.samples is None or work.response_limit is None or work.percentiles is None:
        names = "prompts", "samples", "response_limit", "percentiles"
        missing = next(name for name in names if getattr(work, name) is None)
        raise ClusterError(f"{path}: workload.{missing} is missing (or name a recorded run: workload.lengths.run)")
    percentiles = by_percentile(work.percentiles, "workload", path)
    lengths = Lengths(percentiles, work.response_limit, work.alike, work.growth, work.wander)
    if not 0 <= work.unseen <= 1:
        raise ClusterError(f"{path}: workload.unseen must be a share, from 0 to 1, not {work.unseen}")
    sizes = work.prompts, work.samples, work.epochs, work.prompt_tokens
    made = lengths.epochs(*sizes, seed=work.seed, unseen=work.unseen)
    drafts = _drafts(config.drafts, Drafts())
    largest = work.prompt_tokens + work.response_limit
    return _Work(made, work.prompts * work.epochs, work.prompts, work.samples, work.response_limit, largest, drafts, [])


def _recorded(config: ClusterFile, path: Path) -> _Work:
    work = config.workload
    default = WorkloadFile(work.lengths, response_limit=work.response_limit)
    if given := [name for name, value in vars(work).items() if value != getattr(default, name)]:
        raise ClusterError(f"{path}: workload.lengths.run brings its own: drop workload.{', workload.'.join(given)}")
    if config.drafts.siblings and config.drafts.acceptance is None:
        raise ClusterError(
            f"{path}: what siblings help is in the acceptance that workload.lengths.run brings: drop drafts.siblings, "
            "or set drafts.acceptance"
        )
    try:
        run = recorded.read(from_folder_of(path, str(work.lengths.run)))
    except recorded.RunError as error:
        raise ClusterError(
            f"{path}: workload.lengths.run={work.lengths.run}, which counts from the folder of {path.name}: {error}"
        ) from error
    prompts = recorded.prompts(run)
    samples = max(len(prompt.lengths) for prompt in prompts)
    longest = max(int(prompt.lengths.max()) for prompt in prompts)
    drafts = _drafts(config.drafts, recorded.acceptance(run))
    if config.drafts.acceptance is not None:
        prompts = [prompt.unpaced() for prompt in prompts]
    epoch_prompts = len({prompt.key for prompt in prompts})
    limit = longest if work.response_limit is None else work.response_limit
    unread = list(run.unread)
    trained = {*run.requests["uid"][run.requests["trained"] & ~run.requests["validate"]].tolist()}
    if lost := len(trained) - len(prompts):
        unread.append(f"{run.folder}: {lost} of {len(trained)} prompts have no length of each sample, and are left out")
    largest = max(prompt.tokens + int(prompt.lengths.max()) for prompt in prompts)
    return _Work(prompts, len(prompts), epoch_prompts, samples, limit, largest, drafts, unread)


def _drafts(config: DraftsFile, known: Drafts) -> Drafts:
    acceptance = known.acceptance if config.acceptance is None else tuple(config.acceptance)
    return Drafts(acceptance, known.overhead if config.overhead is None else config.overhead, config.siblings)


def _check_placement(config: PlacementFile, path: Path) -> None:
    try:
        PlacementConfig(config.policy, dict(config.options))
        Placement(config.policy, dict(config.options))
    except (ConfigError, ValueError) as error:
        raise ClusterError(f"{path}: {str(error).replace(f'{CONFIG_PATH}.', '')}") from error


def _streaming(config: ClusterFile, rules: Rules, path: Path) -> Streaming | None:
    of, mode = config.streaming, config.rules.mode
    if not (mode == "stream" if of.enable is None else of.enable):
        return None
    if mode == "sync" or config.topology != "separate":
        raise ClusterError(
            f"{path}: streaming.enable needs a sorted rollout, and engines of their own: set topology=separate and "
            "rules.mode=stream, partial, histopipe or on_policy, or drop it"
        )
    try:
        StreamingConfig(True, of.update, of.part)
    except ConfigError as error:
        raise ClusterError(f"{path}: {str(error).replace(f'{CONFIG_PATH}.', '')}") from error
    return Streaming(max(1, int(of.part * rules.batch_samples)), of.update)  # training's


def _rules(config: RulesFile, samples: int, separate: bool, path: Path) -> Rules:
    rules = _mode(config, samples, separate, path)
    if config.mode == "stream":  # weights come by the relay
        rules = replace(rules, one_by_one=True)
    if not config.keep_running:
        return rules
    if config.mode not in ("partial", "histopipe", "stream") or not (separate and rules.max_staleness):
        raise ClusterError(
            f"{path}: rules.keep_running needs engines of their own and tokens of earlier policies: set "
            "topology=separate and rules.mode=histopipe, or partial or stream with rules.max_staleness at least 1; or "
            "drop it"
        )
    return replace(rules, one_by_one=True, on_interrupt="keep_running")


def _mode(config: RulesFile, samples: int, separate: bool, path: Path) -> Rules:
    if config.mode not in _FIXED:
        raise ClusterError(f"{path}: rules.mode must be one of {', '.join(_FIXED)}, not {config.mode!r}")
    if config.mode == "stream" and not separate:
        raise ClusterError(f"{path}: rules.mode=stream needs engines of their own: set topology=separate")
    if config.mode == "partial" and config.max_staleness == 0:
        raise ClusterError(
            f"{path}: rules.max_staleness must be at least 1 with rules.mode=partial, which mixes versions: set "
            "rules.mode=on_policy, or drop it"
        )
    if config.draft_ahead and not (separate and config.mode in ("sync", "on_policy")):
        raise ClusterError(
            f"{path}: rules.draft_ahead=true needs topology=separate and rules.mode=on_policy: set these, or drop it"
        )
    given = {name: value for name in _LEFT_OPEN if (value := getattr(config, name)) is not None}
    left: dict[str, Any] = {"max_staleness": 1} if config.mode in ("partial", "stream") else {}  # training's default
    left |= {
        **{name: value for name, value in given.items() if name not in _FIXED[config.mode]},
        "batch_prompts": config.batch_prompts,
        "batch_samples": config.batch_prompts * samples,
        "start_order": config.start_order,
        "unit": config.unit,
        "probe": config.probe,
        "draft_ahead": config.draft_ahead,
        "through_training": separate,
    }
    try:
        rules = Rules(**left, group_batches=1) if config.mode == "sync" else named(config.mode, **left)
    except ValueError as error:
        raise ClusterError(f"{path}: rules.{error}") from error
    if other := [name for name, value in given.items() if getattr(rules, name) != value]:
        raise ClusterError(
            f"{path}: rules.mode={config.mode} has its own {', '.join(other)}: drop rules.{', rules.'.join(other)}"
        )
    if rules.load == "rolling" and "group_batches" in given:
        raise ClusterError(f"{path}: rules.group_batches is for rules.load=group: drop one of them")
    return rules
