"""A cluster and what it runs, from a YAML file (``verl-rhyme simulate``).

Keys and types are those of :mod:`verl_rhyme.simulation.cluster_keys`; the run's options (``max_staleness``,
``scheduling.*``, ...) are those of :mod:`verl_rhyme.config`, read by the same code. A replica's profile is a file of
its own (:mod:`verl_rhyme.planning.profile`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from verl_rhyme.config import CONFIG_PATH, PIPELINES, PRESETS, ConfigError, RhymeConfig, options, presets
from verl_rhyme.config.checks import nearest
from verl_rhyme.config.config_tree import parse
from verl_rhyme.placement import Placement
from verl_rhyme.planning.cost import ReplicaCost, TrainingCost
from verl_rhyme.planning.profile import profile
from verl_rhyme.planning.typed_yaml import ClusterError, by_percentile, plain, typed
from verl_rhyme.scheduling.rules import Rules, of_options
from verl_rhyme.simulation.cluster_keys import OPTIONS, ClusterFile, WorkloadFile
from verl_rhyme.simulation.scenario import Drafts, Scenario, Streaming
from verl_rhyme.simulation.workload import Lengths, Prompt

#: Sections of the file that are the run's options.
_SECTIONS = tuple(dict.fromkeys(option.name.partition(".")[0] for option in OPTIONS))
#: verl's bound of its separate_async: a prompt spans 8 versions at most (``max_off_policy_threshold``).
VERLS_STALENESS = 7
#: What whole numbers must be at least, by key.
_LEAST = {
    **dict.fromkeys(("limit", "updates", "batch_prompts", "workload.prompts", "workload.samples"), 1),
    **{"workload.epochs": 1, "workload.prompt_tokens": 1, "workload.seed": 0},
}


@dataclass(frozen=True)
class Loaded:
    """What is to be simulated.

    Attributes:
        scenario: Cluster and rules.
        prompts: In the order of the loader.
        updates: Update batches that they make, or fewer where the file says so.
        sources: Of the profiles' figures.
        total: Prompts of all epochs.
    """

    scenario: Scenario
    prompts: Iterable[Prompt]
    updates: int
    sources: list[str]
    total: int


def load(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read a cluster file.

    Args:
        path: Of the YAML.
        overrides: ``key.in.it=value``; an element of a list has its number as key, from 0 on.

    Raises:
        ClusterError: It cannot be read, or says what cannot be.
    """
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
    """See that no key is unknown."""
    known = [*(of.name for of in fields(ClusterFile)), *_SECTIONS]
    for key in own:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}"
            raise ClusterError(f"{path}: unknown key {key}: {hint}")


def _run(config: ClusterFile, tree: dict[str, Any]) -> RhymeConfig:
    """The run's options: the preset's, and over these the file's.

    Raises:
        ConfigError: There are no such, or they are not simulated.
    """
    preset = "off" if config.preset in (None, "False") else str(config.preset)  # YAML's off
    if preset not in PRESETS:
        raise ConfigError(f"preset must be {', '.join(PRESETS)}, not {preset!r}{nearest(preset, PRESETS)}")
    run = parse(OmegaConf.to_container(OmegaConf.merge(presets.tree(preset), tree)))  # type: ignore[arg-type]
    assert run is not None  # enable is no key here
    played, default = {option.name for option in OPTIONS}, RhymeConfig()
    for option in options():
        value = attrgetter(option.name)
        if option.name not in played and value(run) != value(default):
            raise ConfigError(f"{option.name} is not simulated: drop it")
    if (run.max_staleness is None) != (preset not in PIPELINES):
        bound = "null" if run.max_staleness is None else run.max_staleness
        raise ConfigError(
            f"preset={preset} with max_staleness={bound}: presets with the pipeline ({', '.join(PIPELINES)}) "
            "have a bound, off and histospec are verl's own schedule"
        )
    return run


def _check_bounds(config: ClusterFile, path: Path) -> None:
    if not config.drafts.acceptance:
        raise ClusterError(
            f"{path}: drafts.acceptance is empty: name a pace for each epoch, such as [1, 2], or drop it"
        )
    told = [(key, attrgetter(key)(config), least) for key, least in _LEAST.items()]
    told += [(f"replicas.{i}.count", kind.count, 1) for i, kind in enumerate(config.replicas)]
    for key, value, least in told:
        if value is not None and value < least:
            raise ClusterError(f"{path}: {key} must be at least {least}, not {value}")


def _scenario(config: ClusterFile, run: RhymeConfig, path: Path) -> Loaded:
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
    for name, value, values in (
        ("topology", config.topology, ("colocated", "separate")),
        ("forecasts", config.forecasts, ("history", "oracle", "none")),
    ):
        if value not in values:
            raise ClusterError(f"{path}: {name} must be {', '.join(values)}, not {value!r}")
    work = config.workload
    prompts = _prompts(work, path)
    largest, total = work.prompt_tokens + work.response_limit, work.prompts * work.epochs
    if small := [i for i, kind in enumerate(rooms) if kind < largest]:
        raise ClusterError(
            f"{path}: replicas.{small[0]} has room for {rooms[small[0]]:.0f} tokens, and a request may have "
            f"{largest}: set replicas.{small[0]}.room, or shorten the workload"
        )
    updates = total // config.batch_prompts
    if not updates:
        raise ClusterError(f"{path}: its {total} prompts are fewer prompts than batch_prompts={config.batch_prompts}")
    updates = updates if config.updates is None else min(updates, config.updates)
    Placement(run.placement.policy or "least_loaded", dict(run.placement.options))  # values that it refuses
    rules = _rules(config, run)
    part = run.streaming.part if run.pipeline and config.topology == "separate" else None
    scenario = Scenario(
        replicas=tuple(costs),
        rules=rules,
        training=TrainingCost(**{name: value for name, value in vars(config.training).items() if name != "gradients"}),
        streaming=None
        if part is None
        else Streaming(max(1, int(part * rules.batch_samples)), config.training.gradients),
        colocated=config.topology == "colocated",
        placement=run.placement.policy or "least_loaded",  # verl's router
        options=dict(run.placement.options),
        drafts=_drafts(config),
        limit=config.limit,
        min_starts=1
        if config.limit is None
        else max(1, (config.limit - sum(cost.slots for cost in costs)) // 2),  # training's
        forecasts=config.forecasts,  # type: ignore[arg-type]
        response_limit=work.response_limit,
    )
    return Loaded(scenario, prompts, updates, sources, total)


def _prompts(work: WorkloadFile, path: Path) -> Iterator[Prompt]:
    lengths = Lengths(
        by_percentile(work.percentiles, "workload", path), work.response_limit, work.alike, work.growth, work.wander
    )
    if not 0 <= work.unseen <= 1:
        raise ClusterError(f"{path}: workload.unseen must be a share, from 0 to 1, not {work.unseen}")
    sizes = work.prompts, work.samples, work.epochs, work.prompt_tokens
    return lengths.epochs(*sizes, seed=work.seed, unseen=work.unseen)


def verls_rules(batch_prompts: int, samples: int, *, separate: bool) -> Rules:
    """What verl's own modes do: ``sync``, or ``separate_async``, whose two batches in flight start at once."""
    rules = Rules(batch_prompts, batch_prompts * samples, max_staleness=0, in_flight=1)
    if not separate:
        return rules
    return replace(rules, max_staleness=VERLS_STALENESS, in_flight=2, start_early=True, separate=True)


def _drafts(config: ClusterFile) -> Drafts:
    return Drafts(tuple(config.drafts.acceptance), config.drafts.overhead)


def _rules(config: ClusterFile, run: RhymeConfig) -> Rules:
    """The pipeline's; without ``max_staleness`` verl's own."""
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
