"""Keys of a cluster file (docs/studies/simulation.md): cluster, workload, and options of the run (docs/options.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from verl_rhyme.config import options


@dataclass
class ReplicasFile:
    """``count`` replicas of one kind; ``slots`` and ``room`` override the profile's."""

    count: int = MISSING
    profile: str = MISSING
    slots: int | None = None
    room: float | None = None


@dataclass
class TrainingFile:
    """:class:`~verl_rhyme.planning.cost.TrainingCost`; ``gradients``: whether streamed parts compute gradients, not
    only log-probabilities."""

    token: float = 0.0
    logprobs: float = 0.25
    update: float = 0.0
    part: float = 0.0
    sync: float = 0.0
    reward: float = 0.0
    start: float = 0.0
    copy: float | None = None
    gradients: bool = True


@dataclass
class WorkloadFile:
    """Prompts of an epoch and :class:`~verl_rhyme.simulation.workload.Lengths`."""

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
