"""Cluster files of ``verl-rhyme simulate``: a YAML file with a cluster and its workload (docs/papers/streamrl.md).

The run's options (``max_staleness``, ``scheduling.*``, ...) are those of :mod:`verl_rhyme.config`, read by the same
code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

from verl_rhyme.config import CONFIG_PATH, PIPELINES, PRESETS, ConfigError, RhymeConfig, presets
from verl_rhyme.config.checks import nearest
from verl_rhyme.config.config_tree import parse
from verl_rhyme.placement import Placement
from verl_rhyme.planning import profile
from verl_rhyme.planning.cost import ReplicaCost, TrainingCost
from verl_rhyme.planning.profile import Profile
from verl_rhyme.planning.typed_yaml import ClusterError, by_percentile, plain, typed
from verl_rhyme.planning.workload import Lengths, Prompt, Turns
from verl_rhyme.scheduling.rules import Rules, of_options
from verl_rhyme.simulation.scenario import Drafts, Scenario


@dataclass
class ReplicasFile:
    """``count`` replicas of one kind: of the file's model on a GPU of the table, or with a measured profile."""

    count: int = MISSING
    gpu: str | None = None
    tp: int = 1
    dtype: str = "bfloat16"
    factor: float = 1.0  # measured over calculated time
    kv_offloading_size: float = 0.0  # GiB of host memory for KV cache, of each replica
    profile: str | None = None


@dataclass
class TrainingFile:
    """:class:`~verl_rhyme.planning.cost.TrainingCost`; without ``token``, ``gpus`` like the replicas' train."""

    token: float | None = None
    gpus: int | None = None  # None: the replicas', if they are colocated
    update: float = 0.0
    part: float = 0.0
    sync: float = 0.0
    reward: float = 0.0
    copy: float | None = None


@dataclass
class WorkloadFile:
    """Arguments of :class:`~verl_rhyme.planning.workload.Lengths`, of its ``turns``, and of its ``epochs``."""

    prompts: int = MISSING
    samples: int = MISSING
    epochs: int = 2
    prompt_tokens: int = 512
    response_limit: int = MISSING
    percentiles: dict[Any, float] = MISSING
    alike: float = 0.6
    wander: float = 0.2
    turns: float = 1.0
    turns_spread: float = 0.35
    max_turns: int = 64
    tool_seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    tool_tokens: int = 0
    seed: int = 0


@dataclass
class DraftsFile:
    """:class:`~verl_rhyme.simulation.scenario.Drafts`."""

    acceptance: list[float] = field(default_factory=lambda: [1.0])
    overhead: float = 1.5


@dataclass
class ClusterFile:
    """A cluster file; in addition to these keys it has the run's own (:data:`_RUN`)."""

    model: str | None = None
    replicas: list[ReplicasFile] = MISSING
    workload: WorkloadFile = field(default_factory=WorkloadFile)
    batch_prompts: int = MISSING
    preset: str | None = None
    training: TrainingFile = field(default_factory=TrainingFile)
    topology: str = "colocated"
    drafts: DraftsFile = field(default_factory=DraftsFile)
    forecasts: str = "history"


#: Keys of the run's options, as in :mod:`verl_rhyme.config`, and those of them that the simulator does not know.
_RUN = ("max_staleness", "scheduling", "placement", "streaming")
_NOT_SIMULATED = (
    *("scheduling.tool_timeout", "scheduling.order", "scheduling.lost_after", "scheduling.outage_timeout"),
    *("placement.profile", "streaming.elastic.min_replicas", "streaming.elastic.max_replicas"),
)
#: verl's staleness bound in separate_async: a prompt spans 8 versions at most (``max_off_policy_threshold``).
VERLS_STALENESS = 7


@dataclass(frozen=True)
class Loaded:
    """A simulation, as read from a cluster file."""

    scenario: Scenario
    prompts: Iterable[Prompt]  # in the order of the data loader
    updates: int
    sources: list[str]  # of the profiles' figures
    total: int  # prompts of all epochs


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a cluster file, with overrides as of :func:`~verl_rhyme.planning.typed_yaml.plain`. Raises ClusterError."""
    return of_tree(plain(path, overrides), path)


def of_tree(tree: Mapping[str, Any], path: Path) -> Loaded:
    """Return the simulation of a cluster file's mapping; errors name ``path``."""
    given = {key: tree[key] for key in _RUN if key in tree}
    config: ClusterFile = typed(ClusterFile, {key: value for key, value in tree.items() if key not in _RUN}, path)
    try:
        return _scenario(config, _run(config, given), path)
    except ClusterError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise ClusterError(f"{path}: {str(error).replace(f'{CONFIG_PATH}.', '')}") from error


def _run(config: ClusterFile, tree: dict[str, Any]) -> RhymeConfig:
    preset = "off" if config.preset in (None, "False") else str(config.preset)  # YAML's off
    if preset not in PRESETS:
        raise ConfigError(f"preset must be {', '.join(PRESETS)}, not {preset!r}{nearest(preset, PRESETS)}")
    run = parse(OmegaConf.to_container(OmegaConf.merge(presets.tree(preset), tree)))  # type: ignore[arg-type]
    assert run is not None  # a cluster file has no key enable
    for name in _NOT_SIMULATED:
        if attrgetter(name)(run) != attrgetter(name)(RhymeConfig()):
            raise ConfigError(f"{name} is not simulated: drop it")
    if (run.max_staleness is None) != (preset not in PIPELINES):
        bound = "null" if run.max_staleness is None else run.max_staleness
        raise ConfigError(
            f"preset={preset} with max_staleness={bound}: presets with the pipeline ({', '.join(PIPELINES)}) "
            "need a bound; off and histospec have verl's schedule and take none"
        )
    return run


def _scenario(config: ClusterFile, run: RhymeConfig, path: Path) -> Loaded:
    work = config.workload
    largest, total = work.prompt_tokens + work.response_limit, work.prompts * work.epochs
    costs: list[ReplicaCost] = []
    sources: dict[str, None] = {}  # in order
    for i, kind in enumerate(config.replicas):
        cost, source = _profile(config, i, path)
        costs += [cost] * kind.count
        sources[source] = None
        if cost.room < largest:
            raise ClusterError(
                f"{path}: replicas.{i} has KV cache for {cost.room:.0f} tokens, but a request may have {largest}: "
                f"raise replicas.{i}.tp, or lower workload.prompt_tokens or workload.response_limit"
            )
    if not costs:
        raise ClusterError(f"{path}: replicas is empty: add at least one replica")
    rules, part_samples = _rules(config, run), None
    for name, value, values in (
        ("topology", config.topology, ("colocated", "separate")),
        ("forecasts", config.forecasts, ("history", "none")),
    ):
        if value not in values:
            raise ClusterError(f"{path}: {name} must be {', '.join(values)}, not {value!r}")
    if len(work.tool_seconds) != 2:
        raise ClusterError(f"{path}: workload.tool_seconds must be median and 99th percentile, not {work.tool_seconds}")
    turns = Turns(
        work.turns, work.turns_spread, (work.tool_seconds[0], work.tool_seconds[1]), work.tool_tokens, work.max_turns
    )
    percentiles = by_percentile(work.percentiles, "workload", path)
    lengths = Lengths(percentiles, work.response_limit, work.alike, work.wander, turns)
    prompts = lengths.epochs(work.prompts, work.samples, work.epochs, work.prompt_tokens, work.seed)
    updates = total // config.batch_prompts
    if not updates:
        raise ClusterError(
            f"{path}: the workload has {total} prompts, fewer than batch_prompts={config.batch_prompts}: "
            "raise workload.prompts, or lower batch_prompts"
        )
    Placement(run.placement.policy or "least_loaded", dict(run.placement.options))  # checks the options early
    if run.pipeline and config.topology == "separate" and run.streaming.part is not None:
        part_samples = max(1, int(run.streaming.part * rules.batch_samples))
    scenario = Scenario(
        replicas=tuple(costs),
        rules=rules,
        training=_training(config, sum(cost.gpus for cost in costs), path),
        part_samples=part_samples,
        colocated=config.topology == "colocated",
        placement=run.placement.policy or "least_loaded",  # verl's router
        options=dict(run.placement.options),
        drafts=Drafts(tuple(config.drafts.acceptance), config.drafts.overhead),
        limited=run.pipeline,
        forecasts=config.forecasts,  # type: ignore[arg-type]
        response_limit=work.response_limit,
    )
    return Loaded(scenario, prompts, updates, list(sources), total)


def _profile(config: ClusterFile, number: int, path: Path) -> Profile:
    kind = config.replicas[number]
    where = f"{path}: replicas.{number}"
    if not 0 <= kind.kv_offloading_size < math.inf:
        raise ClusterError(f"{where}.kv_offloading_size must be GiB, at least 0, not {kind.kv_offloading_size}")
    if kind.profile is not None:
        if kind.kv_offloading_size:
            raise ClusterError(f"{where}.kv_offloading_size: set host (tokens) in {kind.profile} instead")
        cost, source = profile.measured(kind.profile, path)
        return Profile(cost.slowed(kind.factor), source)
    if config.model is None or kind.gpu is None:
        missing = "model" if config.model is None else f"replicas.{number}.gpu"
        raise ClusterError(f"{path}: {missing} is missing: set it, or replicas.{number}.profile to a measured profile")
    host = kind.kv_offloading_size * (1 << 30)
    return profile.calculated(config.model, kind.gpu, kind.tp, kind.dtype, kind.factor, path, where, host=host)


def _training(config: ClusterFile, gpus: int, path: Path) -> TrainingCost:
    given = {**vars(config.training)}
    count, token, gpu = given.pop("gpus"), given.pop("token"), config.replicas[0].gpu
    if token is None:
        count = gpus if count is None and config.topology == "colocated" else count
        if config.model is None or gpu is None or not count:
            raise ClusterError(
                f"{path}: training.token is missing: set it (seconds of a token), or what makes it: model, "
                "replicas.0.gpu and training.gpus"
            )
        token = profile.training_token(config.model, gpu, path, f"{path}: replicas.0") / count
    return TrainingCost(token, **given)


def verls_rules(batch_prompts: int, samples: int, *, separate: bool) -> Rules:
    """Return the rules of verl's trainers: ``sync``, or ``separate_async`` with two batches in flight."""
    rules = Rules(batch_prompts, batch_prompts * samples, max_staleness=0, in_flight=1)
    if not separate:
        return rules
    return replace(rules, max_staleness=VERLS_STALENESS, in_flight=2, start_early=True, separate=True)


def _rules(config: ClusterFile, run: RhymeConfig) -> Rules:
    separate = config.topology == "separate"
    if run.max_staleness is None:
        return verls_rules(config.batch_prompts, config.workload.samples, separate=separate)
    return of_options(
        run.scheduling,
        run.max_staleness,
        separate=separate,
        batch_prompts=config.batch_prompts,
        samples=config.workload.samples,
        unit=run.scheduling.unit or "group",
        relayed=separate,
        drafts=max(config.drafts.acceptance) > 1,
    )
