"""Keys of a cluster file, as docs/simulation.md tells them to users: those of cluster and workload, and the run's own
options (docs/options.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from verl_rhyme.config import options


@dataclass
class ReplicasFile:
    """So many replicas of a kind; ``slots`` and ``room`` in place of the profile's."""

    count: int = MISSING
    profile: str = MISSING
    slots: int | None = None
    room: float | None = None


@dataclass
class TrainingFile:
    """:class:`~verl_rhyme.planning.cost.TrainingCost`; ``gradients``: of streamed parts, too, and not their
    log-probabilities alone."""

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
class DraftsFile:
    """:class:`~verl_rhyme.simulation.scenario.Drafts`; ``null``: a recorded run's own, else 1 and 1.5. What siblings
    help is in a recorded run's own acceptance, and is not added to that."""

    acceptance: list[float] | None = None
    overhead: float | None = None
    siblings: float = 0.0


@dataclass
class ClusterFile:
    """The whole file; beside these keys it has the options of :data:`OPTIONS`."""

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


#: Options of the run that the simulator has no part for.
_UNPLAYED = (
    *("scheduling.tool_timeout", "scheduling.order", "scheduling.lost_after", "placement.profile"),
    *("streaming.elastic.min_replicas", "streaming.elastic.max_replicas"),
)
#: Options of the run that the file may have, by their names in :mod:`verl_rhyme.config`.
OPTIONS = tuple(
    option
    for option in options()
    if option.name.partition(".")[0] in ("max_staleness", "scheduling", "placement", "streaming")
    and option.name not in _UNPLAYED
)
