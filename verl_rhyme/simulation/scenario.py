"""Input and output of a simulation: the scenario (cluster and workload) and its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from verl_rhyme.observability.metrics import fillable_slots
from verl_rhyme.planning.cost import ReplicaCost, TrainingCost
from verl_rhyme.scheduling.rules import Rules

#: Tokens per step of text regenerated with itself as draft, verified in long runs.
AGAIN = 20.0


@dataclass(frozen=True)
class Drafts:
    """Effect of drafts on a request, by the number of earlier visits of its prompt."""

    #: Tokens per step of prompts seen 0, 1, ... times before; the last value also for more.
    acceptance: tuple[float, ...] = (1.0,)
    overhead: float = 1.5  # verified draft tokens per token gained
    again: float = AGAIN  # tokens per step of text regenerated with itself as draft (Rules.redrafts)

    def __post_init__(self) -> None:
        if not self.acceptance or not all(1 <= value < math.inf for value in (*self.acceptance, self.overhead)):
            raise ValueError(
                "drafts.acceptance must be one or more acceptance lengths, such as [1, 2], and like drafts.overhead at "
                f"least 1, not {self.acceptance} and {self.overhead}"
            )

    def of(self, seen: int, tokens: float, text: float = 0.0) -> tuple[float, float]:
        """Return the tokens and the draft tokens per step of a response of ``tokens``, whose prompt was ``seen``
        before.

        ``text`` of them are regenerated with their earlier text as draft.
        """
        pace = self.acceptance[min(seen, len(self.acceptance) - 1)]
        drafts = (pace - 1) * self.overhead
        if text := min(text, tokens):
            steps, again = (tokens - text) / pace, text / self.again
            pace, drafts = tokens / (steps + again), (drafts * steps + text) / (steps + again)
        return pace, drafts


@dataclass(frozen=True)
class Scenario:
    """A cluster and its workload."""

    replicas: tuple[ReplicaCost, ...]
    rules: Rules
    training: TrainingCost = field(default_factory=TrainingCost)
    part_samples: int | None = None  # minimum samples of a streamed part; None: whole batches
    colocated: bool = True  # engines share the actor's GPUs and stop while it trains
    placement: str = "least_loaded"
    options: dict[str, Any] = field(default_factory=dict)  # of the placement policy
    drafts: Drafts = field(default_factory=Drafts)
    limited: bool = False  # samples start as slots and KV caches allow (Capacity), as in the pipeline
    forecasts: Literal["history", "none"] = "history"  # lengths by which samples are placed and ordered
    response_limit: int = 1 << 20  # most tokens of a response

    @property
    def redrafts(self) -> bool:
        return self.rules.redrafts and max(self.drafts.acceptance) > 1

    @property
    def slots(self) -> int:
        """Q of the bubble ratio: the slots that samples can fill, as in training."""
        return fillable_slots(sum(cost.slots for cost in self.replicas), self.rules.samples_in_flight)

    @property
    def blocked_s(self) -> float:
        return self.training.blocked_s(self.rules.one_by_one)

    @property
    def pauses(self) -> bool:
        """Whether engines are idle while the actor trains, so that the bubble ratio is of rollouts."""
        return self.colocated or not self.rules.starts_through_training


class Part(NamedTuple):
    """A part of a batch, trained before the batch was complete."""

    began: float
    ended: float
    samples: int
    tokens: int  # of prompts and responses


@dataclass(frozen=True)
class Step:
    """A training step: a rollout and the training of its batch."""

    version: int  # policy version that is trained
    began: float  # seconds of the last step's end, the batch's collection, and this step's end
    collected: float
    ended: float
    tokens: int  # trained response tokens
    samples: int
    wasted: int  # generated tokens that are never trained
    bubble: float  # of the time since the last collection if engines run during training, else of the rollout
    groups: int
    staleness_mean: float  # of the oldest token of each trained group, in policy versions
    staleness_max: int
    lengths: dict[str, float]  # quality of the length forecasts (Quality.pop_metrics)
    parts: tuple[Part, ...] = ()

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def parts_s(self) -> float:
        return sum(part.ended - part.began for part in self.parts)

    @property
    def idle_s(self) -> float:
        """Seconds that the trainer waited for the batch."""
        return self.rollout - self.parts_s

    @property
    def early_share(self) -> float:
        return sum(part.samples for part in self.parts) / max(1, self.samples)

    @property
    def rollout(self) -> float:
        return self.collected - self.began
