"""What is simulated, and what comes of it: a cluster with what it runs, and its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from verl_rhyme.observability.metrics import fillable_slots
from verl_rhyme.planning.cost import ReplicaCost, TrainingCost
from verl_rhyme.scheduling.rules import Rules

#: Tokens a step of a regenerated response's own text as draft, verified in long runs (docs/studies/coupling.md).
AGAIN = 20.0


@dataclass(frozen=True)
class Drafts:
    """What drafting does to a request, by the epochs that its prompt was seen in before.

    Attributes:
        acceptance: Tokens a step, for prompts seen 0, 1, ... times; the last one for more.
        overhead: Verified draft tokens for each token gained.
        again: Tokens a step of text that is regenerated with itself as draft (``Rules.redrafts``).
    """

    acceptance: tuple[float, ...] = (1.0,)
    overhead: float = 1.5
    again: float = AGAIN

    def __post_init__(self) -> None:
        if not self.acceptance or not all(1 <= value < math.inf for value in (*self.acceptance, self.overhead)):
            raise ValueError(f"acceptance lengths must be at least 1, as must the overhead, not {self}")

    def of(self, seen: int, tokens: float, text: float = 0.0) -> tuple[float, float]:
        """Tokens a step and draft tokens a step of a response.

        Args:
            seen: Times that its prompt was seen before.
            tokens: Its length.
            text: Tokens of it that were generated before, and are regenerated with that text as draft.
        """
        pace = self.acceptance[min(seen, len(self.acceptance) - 1)]
        drafts = (pace - 1) * self.overhead
        if text := min(text, tokens):
            steps, again = (tokens - text) / pace, text / self.again
            pace, drafts = tokens / (steps + again), (drafts * steps + text) / (steps + again)
        return pace, drafts


class Streaming(NamedTuple):
    """Training beside the rollout, as :class:`~verl_rhyme.config.StreamingConfig` has it.

    Attributes:
        samples: A part has at least so many.
        update: Gradients do not wait for the whole batch.
    """

    samples: int
    update: bool = True


@dataclass(frozen=True)
class Scenario:
    """A cluster and what it runs.

    Attributes:
        replicas: Their costs, one each.
        rules: The scheduler's.
        training: What an update costs.
        streaming: Updates come in parts; ``None``: each as a whole.
        colocated: Engines stand still while the actor trains; else they have GPUs of their own.
        placement: Policy and options (:data:`~verl_rhyme.placement.POLICIES`).
        drafts: What drafting gains.
        limit: Samples that are given to the engines at a time; ``None``: all that may start.
        min_starts: So many more are given at once, or none.
        forecasts: What placement and order go by. ``history``: what the predictor expects; ``oracle``: the lengths
            there will be; ``none``: nothing.
        response_limit: Tokens a response can have.
    """

    replicas: tuple[ReplicaCost, ...]
    rules: Rules
    training: TrainingCost = field(default_factory=TrainingCost)
    streaming: Streaming | None = None
    colocated: bool = True
    placement: str = "least_loaded"
    options: dict[str, Any] = field(default_factory=dict)
    drafts: Drafts = field(default_factory=Drafts)
    limit: int | None = None
    min_starts: int = 1
    forecasts: Literal["history", "oracle", "none"] = "history"
    response_limit: int = 1 << 20

    @property
    def redrafts(self) -> bool:
        """What is regenerated has its own text as draft."""
        return self.rules.redrafts and max(self.drafts.acceptance) > 1

    @property
    def slots(self) -> int:
        """Q of the bubble ratio: slots that samples can fill, as in training."""
        return fillable_slots(sum(cost.slots for cost in self.replicas), self.rules.samples_in_flight)

    @property
    def held(self) -> float:
        """Seconds for which publication holds the trainer."""
        return self.training.held(self.rules.one_by_one)

    @property
    def rests(self) -> bool:
        """Engines have nothing to do while the actor trains: the bubble ratio is of rollouts alone, as in training."""
        return self.colocated or not self.rules.starts_through_training


class Part(NamedTuple):
    """Of an update batch, what went through training before the batch was whole.

    Attributes:
        began, ended: Seconds.
        samples: How many.
        tokens: Of their prompts and responses.
    """

    began: float
    ended: float
    samples: int
    tokens: int


@dataclass(frozen=True)
class Step:
    """An update and the rollout before it.

    Attributes:
        version: The policy that it trains.
        began, collected, ended: Seconds: the last update's end, the harvest, this one's end.
        tokens, samples: Trained.
        wasted: Tokens made and not to be trained.
        bubble: Bubble ratio, from the last harvest to this one with engines that run on, else of the rollout alone.
        groups: Trained.
        staleness_mean, staleness_max: Of trained groups' oldest tokens, in policy versions.
        lengths: What forecasts were worth (:meth:`~verl_rhyme.lengths.quality.Quality.take`).
        ahead: Seconds from the end of its last response to the harvest.
        parts: That came before the batch was whole, in their order.
        rest: Tokens, of prompts and responses, of what was in none of them.
    """

    version: int
    began: float
    collected: float
    ended: float
    tokens: int
    samples: int
    wasted: int
    bubble: float
    groups: int
    staleness_mean: float
    staleness_max: int
    lengths: dict[str, float]
    ahead: float = 0.0
    parts: tuple[Part, ...] = ()
    rest: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def in_parts(self) -> float:
        """Seconds of the rollout for which the trainer worked on parts."""
        return sum(part.ended - part.began for part in self.parts)

    @property
    def waited(self) -> float:
        """Seconds for which it waited for the batch, with nothing to do."""
        return self.rollout - self.in_parts

    @property
    def early(self) -> float:
        """Share of the samples that came in parts."""
        return sum(part.samples for part in self.parts) / max(1, self.samples)

    @property
    def rollout(self) -> float:
        return self.collected - self.began
