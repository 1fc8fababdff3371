"""What trainer and coordinator tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from verl_rhyme.planning.cost import TYPICAL, ReplicaCost
from verl_rhyme.scheduling.remembered import Record
from verl_rhyme.scheduling.rules import Rules


class NotOpen(RuntimeError):
    """The coordinator was started anew and knows nothing yet."""


class Part(NamedTuple):
    """Some of the next update batch: whole groups that are finished.

    Attributes:
        keys, tags: Of their trajectories in TransferQueue's ``train``.
    """

    keys: list[str]
    tags: list[dict[str, Any]]


class Wants(NamedTuple):
    """What the trainer is to supply, or to do meanwhile.

    Attributes:
        prompts: To hand over.
        workers: All agent loop workers are gone: others are to be made.
        replicas: A look whether they all live: the wait is long.
        part: To be worked on: it will be in the batch.
    """

    prompts: int = 0
    workers: bool = False
    replicas: bool = False
    part: Part | None = None


class Serving(NamedTuple):
    """How many replicas generate, where some of them rest.

    Attributes:
        share: Of those that :class:`Setting` counts.
        slots: Q of the bubble ratio.
    """

    share: float
    slots: int


@dataclass(frozen=True)
class Setting:
    """What does not change in a run.

    Attributes:
        rules: The scheduler's.
        filters: The metric by which groups are dropped whose trajectories all have one score; ``None``: none are.
        limit: Samples that the engines are given at a time.
        min_starts: How many are started together at least; fewer where the engines are given fewer.
        slots: Q of the bubble ratio.
        lost_after: Seconds without an answer after which an agent loop worker is given up.
        room: Tokens of KV cache that the samples may take together; ``None`` where nobody knows.
        router: A ``PlacementRouter``, which says who serves; ``None``: verl's.
        placement: Policy and options by which the coordinator places samples; ``None``: the router decides.
        cost: What a replica's work costs, and its slots, by which the coordinator plans.
        response_limit: Tokens a response can have.
        part_samples: Samples of a part of the next batch that the trainer would begin with.
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


class Handed(NamedTuple):
    """A prompt whose data are in TransferQueue.

    Attributes:
        uid: Of this loading.
        samples: Responses that are wanted.
        key: Of the prompt itself, the same in every epoch; empty where nobody knows.
    """

    uid: str
    samples: int
    key: str = ""


@dataclass(frozen=True)
class Before:
    """What a coordinator takes up.

    Attributes:
        state: Of a checkpoint, or of the last batch; ``None``: nothing that is in TransferQueue counts.
        handed: Prompts that were handed over since.
        version, batches_left: Of the current policy, and update batches until training ends.
        generation: Above that of every coordinator before (:class:`Rollout`).
        lengths: What was last told of response lengths; ``None``: nothing.
        serving: What was last told of the replicas; ``None``: all serve.
    """

    state: dict[str, Any] | None
    handed: list[Handed]
    version: int
    batches_left: int
    generation: int
    lengths: dict[str, Any] | None = None
    serving: Serving | None = None


@dataclass
class Reply:
    """An update batch, for the trainer.

    Attributes:
        keys, tags: Of its trajectories in TransferQueue's ``train``, shortest first.
        metrics: Of the step.
        filtered: By their common score, how many groups were dropped since the last batch.
        failed: Prompts that were dropped since, because a sample failed.
        wasted: Request records of attempts whose tokens will not be trained.
        dropped, dropped_tags: Keys of finished trajectories that will not be trained, in TransferQueue's ``train``, and
            their tags: groups that were filtered, siblings of samples that failed. Whoever gets the batch clears them.
        state: What the coordinator can be opened with again.
        lengths: What is known of response lengths, where that is news; else ``None``.
        answered: Tokens of the responses to prompts that left since the last batch, by prompt key.
        paces: Seconds of a token of a request since the last batch, by the replica's rank.
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
    lengths: dict[str, Any] | None = None
    answered: dict[str, list[int]] = field(default_factory=dict)
    paces: dict[int, float] = field(default_factory=dict)
