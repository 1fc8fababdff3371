"""A cluster and what it runs, from a YAML file (``verl-rhyme simulate``).

A replica's profile is named (a file in ``profiles/``) or a path. Keys and types are those of the dataclasses here.
"""

from __future__ import annotations

import difflib
import math
import operator
import os
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from verl_rhyme.config import CONFIG_PATH, ConfigError, PlacementConfig
from verl_rhyme.scheduling.cost import ReplicaCost, StepCost, TrainingCost
from verl_rhyme.scheduling.placement import Placement
from verl_rhyme.scheduling.rules import MODES, Rules, named
from verl_rhyme.simulation import recorded
from verl_rhyme.simulation.scenario import Drafts, Scenario
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

PROFILES = Path(__file__).parent / "profiles"


class ClusterError(ValueError):
    """A cluster file or profile is wrong; the message says where and how to mend it."""


@dataclass
class StepFile:
    """Of a profile: :class:`~verl_rhyme.scheduling.cost.StepCost`."""

    base: float = MISSING
    row: float = 0.0
    cached: float = 0.0
    draft: float = 0.0
    drafting: float = 0.0


@dataclass
class FitFile:
    """Of a measured profile (``verl-rhyme profile``): when, from how many requests, and the median and ninth decile of
    the relative error of their seconds."""

    date: str = ""
    requests: int = 0
    error: float = 0.0
    worst: float = 0.0


@dataclass
class ProfileFile:
    """One kind of replica: :class:`~verl_rhyme.scheduling.cost.ReplicaCost`, and where its figures are from."""

    source: str = MISSING
    fit: FitFile | None = None
    step: StepFile = field(default_factory=StepFile)
    prefill: float = 0.0
    slots: int = 256
    room: float = math.inf
    gpus: int = 1


@dataclass
class ReplicasFile:
    """So many replicas of a kind; ``slots`` and ``room`` in place of the profile's."""

    count: int = MISSING
    profile: str = MISSING
    slots: int | None = None
    room: float | None = None


@dataclass
class TrainingFile:
    """:class:`~verl_rhyme.scheduling.cost.TrainingCost`."""

    token: float = 0.0
    update: float = 0.0
    sync: float = 0.0
    reward: float = 0.0
    start: float = 0.0


@dataclass
class LengthsFile:
    """``run``: a run folder, whose prompts and response lengths are played again in their order; paths count from the
    cluster file."""

    run: str | None = None


@dataclass
class WorkloadFile:
    """Prompts of an epoch and :class:`~verl_rhyme.simulation.workload.Lengths`, or those of a recorded run."""

    lengths: LengthsFile = field(default_factory=LengthsFile)
    prompts: int | None = None
    samples: int | None = None
    epochs: int = 2
    prompt_tokens: int = 512
    response_limit: int | None = None
    percentiles: dict[Any, float] | None = None
    alike: float = 0.6
    growth: float = 1.0
    wander: float = 0.2
    unseen: float = 0.0
    seed: int = 0


@dataclass
class RulesFile:
    """``mode`` is ``sync`` or one of ``sorting.mode``; ``keep_running`` as ``sorting.keep_running``; the rest as in
    :class:`~verl_rhyme.scheduling.rules.Rules`."""

    mode: str = "sync"
    batch_prompts: int = MISSING
    load: str | None = None
    group_batches: int | None = None
    harvest: str | None = None
    max_staleness: int | None = None
    start_order: str = "load"
    unit: str = "group"
    probe: bool = False
    draft_ahead: bool = False
    keep_running: bool = False


@dataclass
class PlacementFile:
    """A policy of ``placement.policy`` and its options."""

    policy: str = "least_loaded"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class DraftsFile:
    """:class:`~verl_rhyme.simulation.scenario.Drafts`; ``null``: a recorded run's own, else 1 and 1.5. What siblings
    help is in a recorded run's own acceptance, and is not added to that."""

    acceptance: list[float] | None = None
    overhead: float | None = None
    siblings: float = 0.0


@dataclass
class ClusterFile:
    """The whole file."""

    replicas: list[ReplicasFile] = MISSING
    workload: WorkloadFile = field(default_factory=WorkloadFile)
    rules: RulesFile = field(default_factory=RulesFile)
    training: TrainingFile = field(default_factory=TrainingFile)
    topology: str = "colocated"
    placement: PlacementFile = field(default_factory=PlacementFile)
    drafts: DraftsFile = field(default_factory=DraftsFile)
    forecasts: str = "history"
    limit: int | None = None
    updates: int | None = None


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
    config: ClusterFile = _read(ClusterFile, path, overrides)
    try:
        _check_bounds(config, path)
        return _scenario(config, path)
    except ClusterError:
        raise
    except MissingMandatoryValue as error:
        raise ClusterError(f"{path}: {error.full_key or error} is missing") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ClusterError(f"{path}: {error}") from error


def profile(name: str, beside: Path | None = None) -> tuple[ReplicaCost, str]:
    """A kind of replica, and where its figures are from.

    Args:
        name: Of a file in :data:`PROFILES` without its ending, or a path.
        beside: The file that names it, from whose folder paths count; ``None``: from where we are.

    Raises:
        ClusterError: There is none, or it says what cannot be.
    """
    known = sorted(file.stem for file in PROFILES.glob("*.yaml"))
    path = PROFILES / f"{name}.yaml" if name in known else Path(name) if beside is None else _from(beside, name)
    if not path.is_file():
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ClusterError(
            ("" if beside is None else f"{beside}: ")
            + f"no profile {name}: {hint}there are {', '.join(known)}; a YAML's path counts from "
            + ("the current folder" if beside is None else f"the folder of {beside.name}")
            + f", and {path} is no file"
        )
    found: ProfileFile = _read(ProfileFile, path)
    try:
        step = StepCost(**vars(found.step))
        return ReplicaCost(step, found.prefill, found.slots, found.room, found.gpus), found.source
    except ValueError as error:
        raise ClusterError(f"{path}: {error}") from error


def _from(file: Path, name: str) -> Path:
    """A path that a file names, from its folder on."""
    return Path(os.path.normpath(file.parent / name))


def _read(kind: type[Any], path: Path, overrides: Sequence[str] = ()) -> Any:
    try:
        told = OmegaConf.load(path)
    except Exception as error:  # the YAML parser's have no common name
        if isinstance(error, OSError) and error.strerror:  # else OmegaConf's: a single value
            raise ClusterError(f"{path} cannot be read: {error.strerror}") from error
        raise ClusterError(f"{path} is no YAML mapping: {' '.join(str(error).split())}") from error
    if not OmegaConf.is_dict(told):
        raise ClusterError(f"{path} is no YAML mapping of keys to values")
    for override in overrides:
        _override(told, override, path)
    try:
        plain = OmegaConf.to_container(told, resolve=True)
        _check_shape(kind, plain, "", path)
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), plain))
    except ClusterError:
        raise
    except MissingMandatoryValue as error:
        raise ClusterError(f"{path}: {error.full_key} is missing") from error
    except (OmegaConfBaseException, ValueError) as error:
        where = getattr(error, "full_key", None)
        what = str(error).partition("\n")[0]
        raise ClusterError(f"{path}: {where + ': ' if where else ''}{what}") from error


def _override(tree: Any, override: str, path: Path) -> None:
    """Set what ``KEY=VALUE`` says; a mapping is merged."""
    key, given, _ = override.partition("=")
    if not given or not key:
        raise ClusterError(f"{path}: {override!r} is no KEY=VALUE, such as rules.mode=partial")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value{override[len(key) :]}"]))
        OmegaConf.update(tree, key, value["value"])  # type: ignore[index, call-overload]
    except (IndexError, ValueError, TypeError, OmegaConfBaseException) as error:
        raise ClusterError(
            f"{path}: cannot set {override}: a list's elements that are there have numbers from 0 on, such as "
            "replicas.0.count=4; a whole list is set by replicas='[{count: 4, profile: NAME}]'"
        ) from error
    except Exception as error:  # the YAML parser's have no common name
        raise ClusterError(f"{path}: {override} is no YAML: {' '.join(str(error).split())}") from error


_LIST_SUCH_AS = {"replicas": "[{count: 4, profile: NAME}]"}


def _check_shape(kind: Any, value: Any, key: str, path: Path) -> None:
    """See that keys are known, and mappings, lists and single values where they belong, all the way down."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return
        [kind] = set(get_args(kind)) - {types.NoneType}
    fields = get_type_hints(kind) if is_dataclass(kind) else {}
    if kind is Any or value == MISSING:
        return
    if fields or get_origin(kind) is dict:
        if not isinstance(value, dict):
            keys = f" of {', '.join(fields)}" if fields else ""
            raise ClusterError(f"{path}: {key} must be a mapping{keys}, such as {{KEY: VALUE}}, not {value!r}")
        for name, each in value.items() if fields else ():
            inner = f"{key}.{name}" if key else name
            if name not in fields:
                near = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(fields)}"
                raise ClusterError(f"{path}: unknown key {inner}: {hint}")
            _check_shape(fields[name], each, inner, path)
    elif get_origin(kind) is list:
        if not isinstance(value, list):
            raise ClusterError(
                f"{path}: {key} must be a list such as {_LIST_SUCH_AS.get(key, '[1, 2]')}, not {value!r}"
            )
        for i, each in enumerate(value):
            _check_shape(get_args(kind)[0], each, f"{key}.{i}", path)
    elif isinstance(value, dict | list):
        raise ClusterError(f"{path}: {key} must be a single value, not {value!r}")


def _check_bounds(config: ClusterFile, path: Path) -> None:
    told: list[tuple[str, float | None, float]] = [
        (key, operator.attrgetter(key)(config), least) for key, least in _LEAST.items()
    ]
    for i, kind in enumerate(config.replicas):
        told += [(f"replicas.{i}.{name}", getattr(kind, name), 1) for name in ("count", "slots")]
        if kind.room != math.inf:
            told.append((f"replicas.{i}.room", kind.room, 1))
    told += [(f"drafts.acceptance.{i}", pace, 1) for i, pace in enumerate(config.drafts.acceptance or [])]
    told += [(f"workload.percentiles.{p}", tokens, 1) for p, tokens in (config.workload.percentiles or {}).items()]
    for key, value, least in told:
        if value is not None and not least <= value < math.inf:
            bound = "finite" if value == math.inf else f"at least {least}"
            raise ClusterError(f"{path}: {key} must be {bound}, not {value}")


def _scenario(config: ClusterFile, path: Path) -> Loaded:
    costs: list[ReplicaCost] = []
    sources = []
    for kind in config.replicas:
        cost, source = profile(kind.profile, path)
        slots = cost.slots if kind.slots is None else kind.slots
        room = cost.room if kind.room is None else kind.room
        costs += [ReplicaCost(cost.step, cost.prefill, slots, room, cost.gpus)] * kind.count
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
    work = _recorded(config, path) if config.workload.lengths.run is not None else _made_up(config, path)
    updates = work.total // config.rules.batch_prompts
    if not updates:
        raise ClusterError(
            f"{path}: its {work.total} prompts are fewer prompts than rules.batch_prompts={config.rules.batch_prompts}"
        )
    updates = updates if config.updates is None else min(updates, config.updates)
    _check_placement(config.placement, path)
    scenario = Scenario(
        replicas=tuple(costs),
        rules=_rules(config.rules, work.samples, config.topology == "separate", path),
        training=TrainingCost(**vars(config.training)),
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
    )
    return Loaded(scenario, work.prompts, updates, sources, work.epoch_prompts, work.total, work.unread)


class _Work(NamedTuple):
    """``total`` prompts over all epochs, of so many samples each."""

    prompts: Iterable[Prompt]
    total: int
    epoch_prompts: int
    samples: int
    response_limit: int
    drafts: Drafts
    unread: list[str]


def _made_up(config: ClusterFile, path: Path) -> _Work:
    work = config.workload
    if work.prompts is None or work.samples is None or work.response_limit is None or work.percentiles is None:
        names = "prompts", "samples", "response_limit", "percentiles"
        missing = next(name for name in names if getattr(work, name) is None)
        raise ClusterError(f"{path}: workload.{missing} is missing (or name a recorded run: workload.lengths.run)")
    percentiles = {float(percentile): tokens for percentile, tokens in work.percentiles.items()}
    lengths = Lengths(percentiles, work.response_limit, work.alike, work.growth, work.wander)
    if not 0 <= work.unseen <= 1:
        raise ClusterError(f"{path}: workload.unseen must be a share, from 0 to 1, not {work.unseen}")
    sizes = work.prompts, work.samples, work.epochs, work.prompt_tokens
    made = lengths.epochs(*sizes, seed=work.seed, unseen=work.unseen)
    drafts = _drafts(config.drafts, Drafts())
    return _Work(made, work.prompts * work.epochs, work.prompts, work.samples, work.response_limit, drafts, [])


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
        run = recorded.read(_from(path, str(work.lengths.run)))
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
    return _Work(prompts, len(prompts), epoch_prompts, samples, limit, drafts, unread)


def _drafts(config: DraftsFile, known: Drafts) -> Drafts:
    acceptance = known.acceptance if config.acceptance is None else tuple(config.acceptance)
    return Drafts(acceptance, known.overhead if config.overhead is None else config.overhead, config.siblings)


def _check_placement(config: PlacementFile, path: Path) -> None:
    try:
        PlacementConfig(config.policy, dict(config.options))
        Placement(config.policy, dict(config.options))
    except (ConfigError, ValueError) as error:
        raise ClusterError(f"{path}: {str(error).replace(f'{CONFIG_PATH}.', '')}") from error


def _rules(config: RulesFile, samples: int, separate: bool, path: Path) -> Rules:
    rules = _mode(config, samples, separate, path)
    if not config.keep_running:
        return rules
    if config.mode not in ("partial", "histopipe") or not (separate and rules.max_staleness):
        raise ClusterError(
            f"{path}: rules.keep_running needs engines of their own and tokens of earlier policies: set "
            "topology=separate and rules.mode=histopipe, or partial with rules.max_staleness at least 1; or drop it"
        )
    return replace(rules, one_by_one=True, on_interrupt="keep_running")


def _mode(config: RulesFile, samples: int, separate: bool, path: Path) -> Rules:
    if config.mode not in _FIXED:
        raise ClusterError(
            f"{path}: rules.mode must be sync, {', '.join(list(MODES)[:-1])} or {list(MODES)[-1]}, not {config.mode!r}"
        )
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
    left: dict[str, Any] = {"max_staleness": 1} if config.mode == "partial" else {}  # training's default
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
