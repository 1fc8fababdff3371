"""Plan files of ``verl-rhyme plan``: a YAML file with sites, kinds of GPU, a model and an update batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import MISSING
from omegaconf.errors import MissingMandatoryValue
from scipy.special import ndtri

from verl_rhyme.config.checks import nearest
from verl_rhyme.planning.planner import Problem
from verl_rhyme.planning.profile import Profile, profile
from verl_rhyme.planning.sites import Links, Model, Pool
from verl_rhyme.planning.times import Training, Work
from verl_rhyme.planning.typed_yaml import ClusterError, by_percentile, from_folder_of, read
from verl_rhyme.simulation import recorded
from verl_rhyme.simulation.workload import Lengths

#: Quantiles that represent a distribution of lengths.
_QUANTILES = 4096
#: Models whose parameters differ by a smaller factor count as the same: 7.6e9 and 8.2e9.
_ALIKE = 1.1


@dataclass
class KindFile:
    """A kind of GPU, for :class:`~verl_rhyme.planning.sites.Pool`, with a profile for each tensor parallel size."""

    name: str = MISSING
    memory: float = MISSING
    price: float | None = None
    gpus_per_node: int = 8
    utilization: float = 0.8
    profiles: list[str] = field(default_factory=list)
    training: Training | None = None


@dataclass
class SiteFile:
    """GPUs of one kind at one site; a site with two kinds has two entries."""

    name: str = MISSING
    kind: str = MISSING
    gpus: int = MISSING
    rollout: bool = True
    training: bool = True


@dataclass
class LinkFile:
    """A network link ``between`` two sites."""

    between: list[str] = field(default_factory=list)
    gbps: float = MISSING


@dataclass
class LengthsFile:
    """``run``: Folder of a run whose trained response lengths to use; relative to the plan file's folder."""

    run: str | None = None


@dataclass
class BatchFile:
    """An update batch; its lengths come from percentiles or from a recorded run."""

    prompts: int = MISSING
    samples: int = MISSING
    prompt_tokens: int = 512
    response_limit: int | None = None
    percentiles: dict[Any, float] | None = None
    lengths: LengthsFile = field(default_factory=LengthsFile)


@dataclass
class PlanDraftsFile:
    """Tokens per decode step with drafts, and verified draft tokens per token gained."""

    acceptance: float = 1.0
    overhead: float = 1.5


@dataclass
class PlanFile:
    """A plan file."""

    kinds: list[KindFile] = MISSING
    sites: list[SiteFile] = MISSING
    links: list[LinkFile] = field(default_factory=list)
    model: Model = MISSING
    batch: BatchFile = field(default_factory=BatchFile)
    drafts: PlanDraftsFile = field(default_factory=PlanDraftsFile)
    max_staleness: int | None = None
    sync: float = 0.0
    copy: float | None = None
    objective: str = "time"
    slowest: float | None = None


@dataclass(frozen=True)
class LoadedPlan:
    """A plan file: its problem, whether to compare staleness bounds because it has none, and the sources of the
    profiles' figures by kind and tensor parallel size.
    """

    problem: Problem
    compare_bounds: bool
    sources: dict[str, str]


def load(path: Path, overrides: Sequence[str] = ()) -> LoadedPlan:
    """Read a plan file, with overrides as of :func:`~verl_rhyme.planning.typed_yaml.plain`. Raises ClusterError."""
    config: PlanFile = read(PlanFile, path, overrides)
    try:
        return _loaded(config, path)
    except ClusterError:
        raise
    except MissingMandatoryValue as error:
        raise ClusterError(f"{path}: {error.full_key or error} is missing") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ClusterError(f"{path}: {error}") from error


def _loaded(config: PlanFile, path: Path) -> LoadedPlan:
    _check(config, path)
    kinds = _by_name(config.kinds, path)
    sources: dict[str, str] = {}
    costs = {}
    for i, (name, kind) in enumerate(kinds.items()):
        given = _profiles(kind.profiles, path)
        _check_model(config.model.parameters, given.values(), f"kinds.{i}", path)
        drafts = config.drafts
        costs[name] = {tp: of.cost.drafted(drafts.acceptance, drafts.overhead) for tp, of in given.items()}
        sources |= {f"{name}, tensor parallel size {tp}": of.source for tp, of in sorted(given.items())}
    pools, seen = [], set[tuple[str, str]]()
    for i, site in enumerate(config.sites):
        if site.kind not in kinds:
            raise ClusterError(
                f"{path}: sites.{i}.kind={site.kind} is not in kinds ({', '.join(kinds)}){nearest(site.kind, kinds)}"
            )
        if (site.name, site.kind) in seen:
            raise ClusterError(f"{path}: sites.{i}: {site.kind} at {site.name} is listed twice: add up their gpus")
        seen.add((site.name, site.kind))
        kind = kinds[site.kind]
        if site.rollout and not costs[site.kind]:
            raise ClusterError(
                f"{path}: {site.kind} generates at {site.name} but has no profile: add one to kinds.profiles of "
                f"{site.kind} (verl-rhyme profile makes one), or set sites.{i}.rollout=false"
            )
        training = kind.training if site.training else None
        of = kind.gpus_per_node, kind.memory, kind.price, kind.utilization
        pools.append(Pool(site.name, site.kind, site.gpus, *of, costs[site.kind] if site.rollout else {}, training))
    problem = Problem(
        pools,
        config.model,
        _work(config.batch, path),
        1 if config.max_staleness is None else config.max_staleness,
        config.sync,
        config.copy,
        Links(_links(config, {site.name for site in config.sites}, path)),
        config.objective,  # type: ignore[arg-type]
        math.inf if config.slowest is None else config.slowest,
    )
    return LoadedPlan(problem, config.max_staleness is None, sources)


def _check(config: PlanFile, path: Path) -> None:
    for name, given in (("kinds", config.kinds), ("sites", config.sites)):
        if not given:
            raise ClusterError(f"{path}: {name} is empty: add at least one entry")
    if config.objective not in ("time", "cost"):
        raise ClusterError(f"{path}: objective must be time or cost, not {config.objective!r}")


def _by_name(kinds: list[KindFile], path: Path) -> dict[str, KindFile]:
    named: dict[str, KindFile] = {}
    for i, kind in enumerate(kinds):
        if kind.name in named:
            raise ClusterError(f"{path}: kinds.{i}.name={kind.name} is used twice: choose another name")
        named[kind.name] = kind
    return named


def _check_model(parameters: float, profiles: Iterable[Profile], where: str, path: Path) -> None:
    """Check that the profiles are of the planned model."""
    for measured in profiles:
        if measured.parameters is not None and not 1 / _ALIKE < parameters / measured.parameters < _ALIKE:
            raise ClusterError(
                f"{path}: {where}: profile {measured.name} is of a model with {measured.parameters:.3g} parameters, "
                f"but model.parameters={parameters:.3g}: use a profile of this model in {where}.profiles, or measure "
                f"one (verl-rhyme profile); {where}.training.token depends on the model, too"
            )


def _profiles(named: Sequence[str], plan: Path) -> dict[int, Profile]:
    """Read the profiles of one kind and return them by tensor parallel size."""
    by_size: dict[int, Profile] = {}
    for name in named:
        each = profile(name, plan)
        if (tp := each.cost.gpus) in by_size:
            raise ClusterError(
                f"{plan}: profiles {', '.join(named)}: two have tensor parallel size {tp} (their gpus): drop one"
            )
        by_size[tp] = each
    return by_size


def _links(config: PlanFile, sites: set[str], path: Path) -> dict[frozenset[str], float]:
    speeds = {}
    for i, link in enumerate(config.links):
        if len(set(link.between)) != 2 or len(link.between) != 2:
            raise ClusterError(f"{path}: links.{i}.between must be two sites, such as [east, west], not {link.between}")
        for name in link.between:
            if name not in sites:
                raise ClusterError(f"{path}: links.{i}.between: {name} is not in sites{nearest(name, sites)}")
        if not 0 < link.gbps < math.inf:
            raise ClusterError(f"{path}: links.{i}.gbps must be above 0 and finite, not {link.gbps}")
        speeds[frozenset(link.between)] = link.gbps * 1e9 / 8
    return speeds


def _work(batch: BatchFile, path: Path) -> Work:
    samples = batch.prompts * batch.samples
    if batch.lengths.run is None:
        if batch.percentiles is None or batch.response_limit is None:
            missing = "percentiles" if batch.percentiles is None else "response_limit"
            raise ClusterError(
                f"{path}: batch.{missing} is missing: set it, or set batch.lengths.run to a recorded run"
            )
        places = ndtri((np.arange(_QUANTILES) + 0.5) / _QUANTILES)
        distribution = Lengths(by_percentile(batch.percentiles, "batch", path), batch.response_limit)
        return Work(distribution.at(places).astype(float), samples, batch.samples, batch.prompt_tokens)
    if batch.percentiles is not None or batch.response_limit is not None:
        raise ClusterError(
            f"{path}: batch.lengths.run has its own lengths: drop batch.percentiles and batch.response_limit"
        )
    folder = from_folder_of(path, batch.lengths.run)
    try:
        lengths, tokens = recorded.lengths(recorded.read(folder))
    except recorded.RunError as error:
        raise ClusterError(f"{path}: batch.lengths.run={batch.lengths.run}: {error}") from error
    return Work(lengths, samples, batch.samples, tokens)
