"""Plan files of ``verl-rhyme plan``: a YAML file with a model, kinds of GPU, sites and an update batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from verl_rhyme.config.checks import nearest
from verl_rhyme.planning import profile, roofline
from verl_rhyme.planning.cost import ReplicaCost
from verl_rhyme.planning.planner import Problem
from verl_rhyme.planning.sites import Model, Pool
from verl_rhyme.planning.times import Training, Work
from verl_rhyme.planning.typed_yaml import ClusterError, by_percentile, errors_with_key, plain, refuse, typed
from verl_rhyme.planning.workload import Lengths


@dataclass
class TrainFile:
    """:class:`~verl_rhyme.planning.times.Training`; without ``token`` it is calculated."""

    token: float | None = None
    update: float = 0.0
    copy_gpus: int = 1
    reserve: float = 0.0


@dataclass
class KindFile:
    """A kind of GPU of the data sheets with ``tp`` of its replicas; or profiles with name, memory, training.token."""

    gpu: str | None = None
    tp: list[int] = field(default_factory=list)
    dtype: str = "bfloat16"
    factor: float = 1.0  # measured over calculated time
    name: str | None = None  # default: gpu
    memory: float | None = None  # bytes of one; default: the data sheet's
    profiles: list[str] = field(default_factory=list)
    price: float | None = None
    gpus_per_node: int = 8
    utilization: float = 0.8
    training: TrainFile | None = None


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
    between: list[str] = field(default_factory=list)
    gbps: float = MISSING


@dataclass
class BatchFile:
    prompts: int = MISSING
    samples: int = MISSING
    prompt_tokens: int = 512
    response_limit: int = MISSING
    percentiles: dict[Any, float] = MISSING


@dataclass
class PlanDraftsFile:
    """Tokens per decode step with drafts, and verified draft tokens per token gained."""

    acceptance: float = 1.0
    overhead: float = 1.5


@dataclass
class PlanFile:
    model: str | None = None
    parameters: float | None = None  # of a model without a calculated profile
    kinds: list[KindFile] = MISSING
    sites: list[SiteFile] = MISSING
    links: list[LinkFile] = field(default_factory=list)
    batch: BatchFile = field(default_factory=BatchFile)
    drafts: PlanDraftsFile = field(default_factory=PlanDraftsFile)
    max_staleness: int | None = None
    sync: float = 0.0
    copy: float | None = None
    objective: str = "time"
    slowest: float | None = None


@dataclass(frozen=True)
class LoadedPlan:
    """A plan file's problem."""

    problem: Problem
    compare_bounds: bool  # it has no staleness bound
    sources: dict[str, str]  # of the profiles' figures, by kind and tensor parallel size


def load(path: Path, overrides: Sequence[str] = ()) -> LoadedPlan:
    """Read a plan file, with overrides as of :func:`~verl_rhyme.planning.typed_yaml.plain`. Raises ClusterError."""
    return of_tree(plain(path, overrides), path)


def of_tree(tree: Mapping[str, Any], path: Path) -> LoadedPlan:
    """Return the problem of a plan file's mapping; errors name ``path``."""
    config: PlanFile = typed(PlanFile, tree, path)
    with errors_with_key(path):
        return _loaded(config, path)


def _loaded(config: PlanFile, path: Path) -> LoadedPlan:
    refuse(
        (not config.kinds, f"{path}: kinds is empty: add at least one entry"),
        (not config.sites, f"{path}: sites is empty: add at least one entry"),
        (config.objective not in ("time", "cost"), f"{path}: objective must be time or cost, not {config.objective!r}"),
    )
    sources: dict[str, str] = {}
    kinds: dict[str, Pool] = {}
    for i, kind in enumerate(config.kinds):
        pool = _kind(config, kind, f"{path}: kinds.{i}", path, sources)
        refuse((pool.kind in kinds, f"{path}: kinds.{i}.name={pool.kind} is used twice: choose another name"))
        kinds[pool.kind] = pool
    problem = Problem(
        _pools(config, kinds, path),
        Model(_parameters(config, path), max(roofline.DTYPES.get(kind.dtype, 2) for kind in config.kinds)),
        _work(config.batch, path),
        1 if config.max_staleness is None else config.max_staleness,
        config.sync,
        config.copy,
        _links(config, {site.name for site in config.sites}, path),
        config.objective,  # type: ignore[arg-type]
        math.inf if config.slowest is None else config.slowest,
    )
    return LoadedPlan(problem, config.max_staleness is None, sources)


def _parameters(config: PlanFile, path: Path) -> float:
    if config.parameters is not None:
        return config.parameters
    if config.model is None:
        raise ClusterError(f"{path}: model is missing: set it, or with measured profiles only, parameters")
    return profile.model(config.model, path).parameters


def _kind(config: PlanFile, kind: KindFile, where: str, path: Path, sources: dict[str, str]) -> Pool:
    """Return a node of a kind of GPU, and add the sources of its costs to ``sources``."""
    sheet = None if kind.gpu is None else profile.gpu(kind.gpu, f"{where}.gpu")
    name, memory = kind.name or kind.gpu, kind.memory or (sheet.memory if sheet else None)
    if name is None or memory is None:
        raise ClusterError(f"{where}: set gpu to a data sheet ({', '.join(roofline.GPUS)}), or name and memory")
    costs: dict[int, ReplicaCost] = {}
    found = [profile.measured(each, path) for each in kind.profiles]
    for tp in kind.tp:
        if config.model is None or kind.gpu is None:
            raise ClusterError(f"{where}.tp needs the file's model and {where.rpartition(' ')[2]}.gpu, or drop it")
        given = config.model, kind.gpu, tp, kind.dtype, kind.factor, path, where
        found.append(profile.calculated(*given, utilization=kind.utilization))
    for cost, source in found:
        if cost.gpus in costs:
            raise ClusterError(f"{where}: two profiles have tensor parallel size {cost.gpus} (their gpus): drop one")
        costs[cost.gpus] = cost.drafted(config.drafts.acceptance, config.drafts.overhead)
        sources[f"{name}, tensor parallel size {cost.gpus}"] = source
    training = None
    if kind.training is not None:
        token = kind.training.token
        if token is None:
            if config.model is None or kind.gpu is None:
                raise ClusterError(f"{where}.training.token is missing: set it, or the file's model and the kind's gpu")
            token = profile.training_token(config.model, kind.gpu, path, where)
        training = Training(token, kind.training.update, kind.training.copy_gpus, kind.training.reserve)
    node = kind.gpus_per_node
    return Pool("", name, node, node, memory, kind.price, kind.utilization, costs, training)


def _pools(config: PlanFile, kinds: dict[str, Pool], path: Path) -> list[Pool]:
    pools: dict[str, Pool] = {}
    for i, site in enumerate(config.sites):
        if site.kind not in kinds:
            raise ClusterError(
                f"{path}: sites.{i}.kind={site.kind} is not in kinds ({', '.join(kinds)}){nearest(site.kind, kinds)}"
            )
        kind = kinds[site.kind]
        if site.rollout and not kind.replicas:
            raise ClusterError(
                f"{path}: {site.kind} generates at {site.name} but has no replicas: set tp of its kind, or set "
                f"sites.{i}.rollout=false"
            )
        pool = replace(
            kind,
            site=site.name,
            gpus=site.gpus,
            replicas=kind.replicas if site.rollout else {},
            training=kind.training if site.training else None,
        )
        if pool.name in pools:
            raise ClusterError(f"{path}: sites.{i}: {site.kind} at {site.name} is listed twice: add up their gpus")
        pools[pool.name] = pool
    return [*pools.values()]


def _links(config: PlanFile, sites: set[str], path: Path) -> dict[frozenset[str], float]:
    speeds = {}
    for i, link in enumerate(config.links):
        where = f"{path}: links.{i}"
        refuse(
            (
                len(set(link.between)) != 2 or len(link.between) != 2,
                f"{where}.between must be two sites, such as [east, west], not {link.between}",
            ),
            *(
                (name not in sites, f"{where}.between: {name} is not in sites{nearest(name, sites)}")
                for name in link.between
            ),
            (not 0 < link.gbps < math.inf, f"{where}.gbps must be above 0 and finite, not {link.gbps}"),
        )
        speeds[frozenset(link.between)] = link.gbps * 1e9 / 8
    return speeds


def _work(batch: BatchFile, path: Path) -> Work:
    lengths = Lengths(by_percentile(batch.percentiles, "batch", path), batch.response_limit)
    return Work(lengths.typical(), batch.prompts * batch.samples, batch.samples, batch.prompt_tokens)
