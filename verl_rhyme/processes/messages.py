"""Messages between the trainer and the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl_rhyme.planning.cost import TYPICAL, ReplicaCost
from verl_rhyme.scheduling.batch import Record
from verl_rhyme.scheduling.rules import Rules


class NotOpen(RuntimeError):
    """The coordinator has restarted and has no state yet."""


class Part(NamedTuple):
    """Finished groups of the next training batch.

    Attributes:
        keys, tags: Keys and tags of their trajectories in TransferQueue's ``train``.
    """

    keys: list[str]
    tags: list[dict[str, Any]]


class TrainerWork(NamedTuple):
    """Work for the trainer while the coordinator has no batch.

    Attributes:
        prompts: Number of prompts to pass.
        workers: Whether to create new agent loop workers, because all are dead.
        replicas: Whether to check that all replicas are alive, because the wait is long.
        part: Part of the next batch to preprocess.
    """

    prompts: int = 0
    workers: bool = False
    replicas: bool = False
    part: Part | None = None


@dataclass(frozen=True)
class RunSettings:
    """Settings that do not change during a run.

    Attributes:
        rules: Rules of the scheduler.
        filters: Metric for dropping groups whose trajectories all have the same score; ``None``: no filter.
        limit: Most samples in the engines at a time.
        min_starts: Least number of samples to start together; the limit may lower it.
        slots: Slots, Q of the bubble ratio.
        lost_after: Seconds without an answer after which an agent loop worker counts as lost.
        room: Tokens of KV cache for all samples together; ``None`` if unknown.
        router: ``PlacementRouter`` that selects the serving replicas; ``None``: the router of verl.
        placement: Policy and options by which the coordinator places samples; ``None``: the router decides.
        cost: Cost model and slots of a replica, for the coordinator's plans.
        response_limit: Most tokens of a response.
        part_samples: Samples in a part of the next batch that the trainer preprocesses.
        outage_s: Seconds without a successful sample after which the run ends.
    """

    rules: Rules
    filters: str | None
    limit: int
    min_starts: int
    slots: int
    lost_after: float
    room: int | None = None
    router: Any = None
    placement: tuple[str, dict[str, Any]] | None = None
    cost: ReplicaCost = TYPICAL
    response_limit: int = 1 << 20
    part_samples: int = 1
    outage_s: float = 900.0


class LoadedPrompt(NamedTuple):
    """A prompt whose data are in TransferQueue.

    Attributes:
        uid: Id that verl assigned when it loaded the prompt.
        samples: Number of responses to generate.
        key: Prompt key, the same in every epoch; empty if unknown.
    """

    uid: str
    samples: int
    key: str = ""


@dataclass(frozen=True)
class ResumeState:
    """State that a coordinator starts from.

    Attributes:
        state: State in a checkpoint, or with the last batch; ``None``: ignore everything in TransferQueue.
        prompts: Prompts passed to the coordinator since then.
        version: Version of the current policy.
        batches_left: Training batches until training ends.
        generation: Number of the coordinator, above that of all earlier ones (:class:`Rollout`).
        lengths: Known lengths (:meth:`Expectations.state_dict`); ``None``: none yet.
        share: Share of the replicas that serve.
    """

    state: dict[str, Any] | None
    prompts: list[LoadedPrompt]
    version: int
    batches_left: int
    generation: int
    lengths: dict[str, Any] | None = None
    share: float = 1.0


@dataclass
class Reply:
    """A training batch, for the trainer.

    Attributes:
        keys, tags: Keys and tags of its trajectories in TransferQueue's ``train``, shortest first.
        metrics: Metrics of the step.
        filtered: Number of groups filtered since the last batch, by their common score.
        failed: Prompts dropped since the last batch because a sample failed.
        wasted: Request records of attempts whose tokens will not be trained.
        dropped, dropped_tags: Keys and tags, in TransferQueue's ``train``, of finished trajectories that will not be
            trained: filtered groups and siblings of failed samples. The receiver of the batch clears them.
        state: State to open the coordinator with again.
        lengths: Lengths learnt since the last batch or checkpoint (:meth:`Expectations.pop_changes`).
    """

    keys: list[str]
    tags: list[dict[str, Any]]
    metrics: dict[str, float]
    filtered: dict[float, int]
    failed: int
    wasted: list[Record]
    state: dict[str, Any]
    dropped: list[str] = field(default_factory=list)
    dropped_tags: list[dict[str, Any]] = field(default_factory=list)
    lengths: dict[str, Any] = field(default_factory=dict)
