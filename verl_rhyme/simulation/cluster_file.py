"""A cluster and what it runs, from a YAML file (``verl-rhyme simulate``).

Keys and types are those of :mod:`verl_rhyme.simulation.cluster_keys`; the run's options (``max_staleness``,
``scheduling.*``, ...) are those of :mod:`verl_rhyme.config`, read by the same code. A replica's profile is a file of
its own (:mod:`verl_rhyme.planning.profile`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

from verl_rhyme.config import CONFIG_PATH, PIPELINES, PRESETS, ConfigError, RhymeConfig, options, presets
from verl_rhyme.config.checks import nearest
from verl_rhyme.config.config_tree import parse
from verl_rhyme.placement import Placement
from verl_rhyme.planning.cost import ReplicaCost, TrainingCost
from verl_rhyme.planning.profile import profile
from verl_rhyme.planning.typed_yaml import ClusterError, by_percentile, from_folder_of, plain, typed
from verl_rhyme.scheduling.rules import Rules, of_options
from verl_rhyme.simulation import recorded
from verl_rhyme.simulation.cluster_keys import OPTIONS, ClusterFile, DraftsFile, WorkloadFile
from verl_rhyme.simulation.scenario import Drafts, Scenario, Streaming
from verl_rhyme.simulation.workload import Lengths, Prompt

#: Sections of the file that are the run's options.
_SECTIONS = tuple(dict.fromkeys(option.name.partition(".")[0] for option in OPTIONS))
#: verl's bound of its separate_async: a prompt spans 8 versions at most (``max_off_policy_threshold``).
VERLS_STALENESS = 7
#: What numbers must be at least, by key; all are finite.
_LEAST = {
    "limit": 1,
    "updates": 1,
    "batch_prompts": 1,
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
    told: list[tuple[str, float | None, float]] = [
        (key, attrgetter(key)(config), least) for key, least in _LEAST.items()
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
    updates = work.total // config.batch_prompts
    if not updates:
        raise ClusterError(
            f"{path}: its {work.total} prompts are fewer prompts than batch_prompts={config.batch_prompts}"
        )
    updates = updates if config.updates is None else min(updates, config.updates)
    Placement(run.placement.policy or "least_loaded", dict(run.placement.options))  # values that it refuses
    rules = _rules(config, run, work)
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


def verls_rules(batch_prompts: int, samples: int, *, separate: bool) -> Rules:
    """What verl's own modes do: ``sync``, or ``separate_async``, whose two batches in flight start at once."""
    rules = Rules(batch_prompts, batch_prompts * samples, max_staleness=0, in_flight=1)
    if not separate:
        return rules
    return replace(rules, max_staleness=VERLS_STALENESS, in_flight=2, start_early=True, separate=True)


def _rules(config: ClusterFile, run: RhymeConfig, work: _Work) -> Rules:
    """The pipeline's; without ``max_staleness`` verl's own."""
    separate = config.topology == "separate"
    if run.max_staleness is None:
        return verls_rules(config.batch_prompts, work.samples, separate=separate)
    return of_options(
        run.scheduling,
        run.max_staleness,
        separate=separate,
        batch_prompts=config.batch_prompts,
        samples=work.samples,
        unit=run.scheduling.unit or "group",
        relayed=separate,
        drafts=max(work.drafts.acceptance) > 1,
    )
