"""Messages between the trainer and the coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from verl_rhyme.planning.cost import TYPICAL, ReplicaCost
from verl_rhyme.scheduling.attempts import Record
from verl_rhyme.scheduling.rules import Rules


class NotOpen(RuntimeError):
    """The coordinator has restarted and has no state yet."""


class Part(NamedTuple):
    """Finished groups of the next training batch: keys and tags of their trajectories in TransferQueue's ``train``."""

    keys: list[str]
    tags: list[dict[str, Any]]


class Handover(NamedTuple):
    """What the trainer takes over from the coordinator, which deletes all else that is no longer needed with the next
    call."""

    state: dict[str, Any]  # to open the coordinator with again
    lengths: dict[str, Any]  # learnt since the last handover or checkpoint (Expectations)
    # Finished trajectories that will not be trained (filtered groups, siblings of failed samples); the receiver records
    # and clears them.
    dropped: Part
    wasted: list[Record]  # requests of attempts whose tokens will not be trained


class TrainerWork(NamedTuple):
    """Work for the trainer while the coordinator has no batch."""

    prompts: int = 0  # to pass
    workers: bool = False  # create new agent loop workers, because all are dead
    replicas: bool = False  # check that all replicas are alive, because the wait is long
    part: Part | None = None  # of the next batch, to preprocess
    handover: Handover | None = None  # take it over, since dropped prompts left much


@dataclass(frozen=True)
class RunSettings:
    """Settings that do not change during a run."""

    rules: Rules
    filters: str | None  # metric for dropping groups whose trajectories all have the same score; None: no filter
    limit: int  # most samples in the engines at a time
    min_starts: int  # least number of samples to start together; the limit may lower it
    slots: int  # Q of the bubble ratio
    lost_after: float  # seconds without an answer after which an agent loop worker counts as lost
    room: int | None = None  # tokens of KV cache for all samples together; None if unknown
    router: Any = None  # PlacementRouter that selects the serving replicas; None: the router of verl
    placement: tuple[str, dict[str, Any]] | None = None  # policy and options; None: the router places samples
    cost: ReplicaCost = TYPICAL  # and slots of a replica, for the coordinator's plans
    response_limit: int = 1 << 20  # most tokens of a response
    part_samples: int = 1  # in a part of the next batch that the trainer preprocesses
    outage_s: float = 900.0  # seconds without a successful sample after which the run ends


class LoadedPrompt(NamedTuple):
    """A prompt whose data are in TransferQueue."""

    uid: str  # assigned by verl when it loaded the prompt
    samples: int  # responses to generate
    key: str = ""  # the same in every epoch; empty if unknown


@dataclass(frozen=True)
class ResumeState:
    """State that a coordinator starts from."""

    state: dict[str, Any] | None  # of a checkpoint or the last handover; None: ignore everything in TransferQueue
    prompts: list[LoadedPrompt]  # passed to the coordinator since then
    version: int  # of the current policy
    batches_left: int  # until training ends
    generation: int  # number of the coordinator, above that of all earlier ones (Rollout)
    lengths: dict[str, Any] | None = None  # Expectations.state_dict; None: none yet
    share: float = 1.0  # of the replicas, that serve


@dataclass
class Reply:
    """A training batch, for the trainer."""

    keys: list[str]  # of its trajectories in TransferQueue's train, shortest first
    tags: list[dict[str, Any]]
    metrics: dict[str, float]  # of the step
    filtered: dict[float, int]  # groups filtered since the last batch, by their common score
    failed: int  # prompts dropped since the last batch because a sample failed
    handover: Handover
