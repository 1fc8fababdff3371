"""Keys of a cluster file, as docs/simulation.md tells them to users."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


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
    logprobs: float = 0.25
    update: float = 0.0
    part: float = 0.0
    sync: float = 0.0
    reward: float = 0.0
    start: float = 0.0
    copy: float | None = None


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
class StreamingFile:
    """:class:`~verl_rhyme.config.StreamingConfig`; ``enable`` is the mode's where it is left open."""

    enable: bool | None = None
    update: bool = True
    part: float = 0.125


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
    streaming: StreamingFile = field(default_factory=StreamingFile)
    training: TrainingFile = field(default_factory=TrainingFile)
    topology: str = "colocated"
    placement: PlacementFile = field(default_factory=PlacementFile)
    drafts: DraftsFile = field(default_factory=DraftsFile)
    forecasts: str = "history"
    ranker: float | None = None
    limit: int | None = None
    updates: int | None = None
