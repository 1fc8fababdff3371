"""Cluster files of ``verl-rhyme simulate``: a YAML file with a cluster and its workload.

The run's options (``max_staleness``, ``scheduling.*``, ...) are those of :mod:`verl_rhyme.config`, read by the same
code. A replica's profile is a separate file (:mod:`verl_rhyme.planning.profile`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from verl_rhyme.config import CONFIG_PATH, PIPELINES, PRESETS, ConfigError, RhymeConfig, options, presets
from verl_rhyme.config.checks import nearest
from verl_rhyme.config.config_tree import parse
from verl_rhyme.placement import Placement
from verl_rhyme.planning.cost import ReplicaCost, TrainingCost
from verl_rhyme.planning.profile import profile
from verl_rhyme.planning.typed_yaml import ClusterError, by_percentile, plain, typed
from verl_rhyme.scheduling.rules import Rules, of_options
from verl_rhyme.simulation.scenario import Drafts, Scenario, Streaming
from verl_rhyme.simulation.workload import Lengths, Prompt


@dataclass
class ReplicasFile:
    """``count`` replicas of one kind; ``slots`` and ``room`` override the profile's."""

    count: int = MISSING
    profile: str = MISSING
    slots: int | None = None
    room: float | None = None


@dataclass
class TrainingFile(TrainingCost):
    """``gradients``: Whether streamed parts compute gradients, not only log-probabilities."""

    gradients: bool = True


@dataclass
class WorkloadFile:
    """Arguments of :class:`~verl_rhyme.simulation.workload.Lengths` and its ``epochs``."""

    prompts: int = MISSING
    samples: int = MISSING
    epochs: int = 2
    prompt_tokens: int = 512
    response_limit: int = MISSING
    percentiles: dict[Any, float] = MISSING
    alike: float = 0.6
    growth: float = 1.0
    wander: float = 0.2
    unseen: float = 0.0
    seed: int = 0


@dataclass
class DraftsFile:
    """:class:`~verl_rhyme.simulation.scenario.Drafts`."""

    acceptance: list[float] = field(default_factory=lambda: [1.0])
    overhead: float = 1.5


@dataclass
class ClusterFile:
    """A cluster file; in addition to these keys it has the options in :data:`OPTIONS`."""

    replicas: list[ReplicasFile] = MISSING
    workload: WorkloadFile = field(default_factory=WorkloadFile)
    batch_prompts: int = MISSING
    preset: str | None = None
    training: TrainingFile = field(default_factory=TrainingFile)
    topology: str = "colocated"
    drafts: DraftsFile = field(default_factory=DraftsFile)
    forecasts: str = "history"
    limit: int | None = None
    updates: int | None = None


#: Options of the run that the simulator ignores.
_NOT_SIMULATED = (
    *("scheduling.tool_timeout", "scheduling.order", "scheduling.lost_after", "placement.profile"),
    *("streaming.elastic.min_replicas", "streaming.elastic.max_replicas"),
)
#: Options of the run allowed in the file, by their names in :mod:`verl_rhyme.config`.
OPTIONS = tuple(
    option
    for option in options()
    if option.name.partition(".")[0] in ("max_staleness", "scheduling", "placement", "streaming")
    and option.name not in _NOT_SIMULATED
)
#: Sections of the file with options of the run.
_SECTIONS = tuple(dict.fromkeys(option.name.partition(".")[0] for option in OPTIONS))
#: verl's staleness bound in separate_async: a prompt spans 8 versions at most (``max_off_policy_threshold``).
VERLS_STALENESS = 7
#: Minimum of integers, by key.
_LEAST = {
    **dict.fromkeys(("limit", "updates", "batch_prompts", "workload.prompts", "workload.samples"), 1),
    **{"workload.epochs": 1, "workload.prompt_tokens": 1, "workload.seed": 0},
}


@dataclass(frozen=True)
class Loaded:
    """A simulation, as read from a cluster file.

    ``prompts`` come in the order of the data loader, ``total`` of all epochs; ``sources`` are of the profiles' figures.
    """

    scenario: Scenario
    prompts: Iterable[Prompt]
    updates: int
    sources: list[str]
    total: int


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a cluster file, with overrides as of :func:`~verl_rhyme.planning.typed_yaml.plain`. Raises ClusterError."""
    tree = plain(path, overrides)
    own = {key: value for key, value in tree.items() if key not in _SECTIONS}
    _check_keys(own, path)
    config: ClusterFile = typed(ClusterFile, own, path)
    try:
        _check_bounds(config, path)
        return _scenario(config, _run(config, {key: tree[key] for key in tree if key in _SECTIONS}), path)
    except ClusterError:
        raise
    except MissingMandatoryValue as error:
        raise ClusterError(f"{path}: {error.full_key or error} is missing") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ClusterError(f"{path}: {str(error).replace(f'{CONFIG_PATH}.', '')}") from error


def _check_keys(own: Mapping[str, Any], path: Path) -> None:
    known = [*(of.name for of in fields(ClusterFile)), *_SECTIONS]
    for key in own:
        if key not in known:
            hint = nearest(key, known) or f"; known keys: {', '.join(known)}"
            raise ClusterError(f"{path}: unknown key {key}{hint}")


def _run(config: ClusterFile, tree: dict[str, Any]) -> RhymeConfig:
    """Return the run's options: those of the preset, overridden by the file's."""
    preset = "off" if config.preset in (None, "False") else str(config.preset)  # YAML's off
    if preset not in PRESETS:
        raise ConfigError(f"preset must be {', '.join(PRESETS)}, not {preset!r}{nearest(preset, PRESETS)}")
    run = parse(OmegaConf.to_container(OmegaConf.merge(presets.tree(preset), tree)))  # type: ignore[arg-type]
    assert run is not None  # a cluster file has no key enable
    simulated, default = {option.name for option in OPTIONS}, RhymeConfig()
    for option in options():
        value = attrgetter(option.name)
        if option.name not in simulated and value(run) != value(default):
            raise ConfigError(f"{option.name} is not simulated: drop it")
    if (run.max_staleness is None) != (preset not in PIPELINES):
        bound = "null" if run.max_staleness is None else run.max_staleness
        raise ConfigError(
            f"preset={preset} with max_staleness={bound}: presets with the pipeline ({', '.join(PIPELINES)}) "
            "need a bound; off and histospec have verl's schedule and take none"
        )
    return run


def _check_bounds(config: ClusterFile, path: Path) -> None:
    bounds = [(key, attrgetter(key)(config), least) for key, least in _LEAST.items()]
    bounds += [(f"replicas.{i}.count", kind.count, 1) for i, kind in enumerate(config.replicas)]
    for key, value, least in bounds:
        if value is not None and value < least:
            raise ClusterError(f"{path}: {key} must be at least {least}, not {value}")


def _scenario(config: ClusterFile, run: RhymeConfig, path: Path) -> Loaded:
    if not config.replicas:
        raise ClusterError(f"{path}: replicas is empty: add at least one kind of replica")
    work = config.workload
    largest, total = work.prompt_tokens + work.response_limit, work.prompts * work.epochs
    costs: list[ReplicaCost] = []
    sources: dict[str, None] = {}  # in order
    for i, kind in enumerate(config.replicas):
        cost, source, *_ = profile(kind.profile, path)
        changes = {name: value for name in ("slots", "room") if (value := getattr(kind, name)) is not None}
        cost = replace(cost, **changes)
        costs += [cost] * kind.count
        sources[source] = None
        if cost.room < largest:
            raise ClusterError(
                f"{path}: replicas.{i} has KV cache for {cost.room:.0f} tokens, but a request may have {largest}: "
                f"raise replicas.{i}.room, or lower workload.prompt_tokens or workload.response_limit"
            )
    for name, value, values in (
        ("topology", config.topology, ("colocated", "separate")),
        ("forecasts", config.forecasts, ("history", "oracle", "none")),
    ):
        if value not in values:
            raise ClusterError(f"{path}: {name} must be {', '.join(values)}, not {value!r}")
    prompts = _prompts(work, path)
    updates = total // config.batch_prompts
    if not updates:
        raise ClusterError(
            f"{path}: the workload has {total} prompts, fewer than batch_prompts={config.batch_prompts}: "
            "raise workload.prompts, or lower batch_prompts"
        )
    updates = updates if config.updates is None else min(updates, config.updates)
    Placement(run.placement.policy or "least_loaded", dict(run.placement.options))  # checks the options early
    drafts = Drafts(tuple(config.drafts.acceptance), config.drafts.overhead)
    rules, streaming, min_starts = _rules(config, run), None, 1
    if run.pipeline and config.topology == "separate" and run.streaming.part is not None:
        streaming = Streaming(max(1, int(run.streaming.part * rules.batch_samples)), config.training.gradients)
    if config.limit is not None:  # as in training
        min_starts = max(1, (config.limit - sum(cost.slots for cost in costs)) // 2)
    scenario = Scenario(
        replicas=tuple(costs),
        rules=rules,
        training=config.training,
        streaming=streaming,
        colocated=config.topology == "colocated",
        placement=run.placement.policy or "least_loaded",  # verl's router
        options=dict(run.placement.options),
        drafts=drafts,
        limit=config.limit,
        min_starts=min_starts,
        forecasts=config.forecasts,  # type: ignore[arg-type]
        response_limit=work.response_limit,
    )
    return Loaded(scenario, prompts, updates, list(sources), total)


def _prompts(work: WorkloadFile, path: Path) -> Iterator[Prompt]:
    lengths = Lengths(
        by_percentile(work.percentiles, "workload", path), work.response_limit, work.alike, work.growth, work.wander
    )
    if not 0 <= work.unseen <= 1:
        raise ClusterError(f"{path}: workload.unseen must be a share, from 0 to 1, not {work.unseen}")
    sizes = work.prompts, work.samples, work.epochs, work.prompt_tokens
    return lengths.epochs(*sizes, seed=work.seed, unseen=work.unseen)


def verls_rules(batch_prompts: int, samples: int, *, separate: bool) -> Rules:
    """Return the rules of verl's trainers: ``sync``, or ``separate_async`` with two batches in flight."""
    rules = Rules(batch_prompts, batch_prompts * samples, max_staleness=0, in_flight=1)
    if not separate:
        return rules
    return replace(rules, max_staleness=VERLS_STALENESS, in_flight=2, start_early=True, separate=True)


def _rules(config: ClusterFile, run: RhymeConfig) -> Rules:
    """Return the rules of the pipeline, or verl's if ``max_staleness`` is null."""
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
