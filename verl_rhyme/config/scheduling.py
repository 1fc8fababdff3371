"""Options of the pipeline: which prompts are in flight, what an update trains, training while the rest is generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from verl_rhyme.config.checks import option, require

#: Samples that the engines are given at a time, as a multiple of their request slots and of what their KV caches hold:
#: above 1, so that a slot that falls free is taken at once.
OVERSUBSCRIPTION = 2.0

#: Values of ``trainer.v1.trainer_mode``, and where engines and training then live.
TOPOLOGIES = {"sync": "colocated", "colocate_async": "colocated", "separate_async": "separate"}

#: Values of ``algorithm.adv_estimator`` that look at one trajectory at a time; all others compare a prompt's samples.
SINGLE_ESTIMATORS = ("gae", "reinforce_plus_plus")


@dataclass(frozen=True)
class SchedulingConfig:
    """Of the pipeline (``max_staleness`` not null); ``tool_timeout`` and ``lost_after`` of verl's own modes, too.

    Presets set what the papers do; the product leaves all at null.
    """

    tool_timeout: float = option(
        3600.0,
        "Seconds that a sample may wait for a tool or its reward, not counting generation; then it fails.",
        public=True,
    )
    in_flight: float | None = option(
        None,
        "Update batches of prompts in flight, at most (a fraction is allowed); null: max(2, 1 + max_staleness / 2), "
        "max_staleness + 1 with take=loaded; on-policy 3 with refill=when_empty, 1.125 with put_off, else 1.",
    )
    put_off: float | None = option(
        None,
        "Tail batching (max_staleness=0): share of prompts, the longest expected first, that wait for an update of "
        "their own; null: 0, and 0.25 without drafts or coupled sampling.",
    )
    take: Literal["finished", "loaded"] = option(
        "finished", "What an update trains: the groups that finish first, or the prompts that were loaded first."
    )
    refill: Literal["always", "when_empty"] | None = option(
        None,
        "When prompts are loaded: at every policy version, or when all in flight are trained; null: always, and "
        "when_empty on-policy but for put_off, take=loaded, and without drafts or coupled sampling.",
    )
    at_version: Literal["continue", "finish", "regenerate"] | None = option(
        None,
        "What running responses do at a new policy: continue under it, finish under the old one (separate engines, "
        "weights by the relay), or be regenerated; null: continue; on-policy regenerate, or finish where nothing runs "
        "at a new policy.",
    )
    unit: Literal["group", "trajectory"] | None = option(
        None,
        "What stays together in an update batch: a prompt's samples, or each trajectory alone; null: by "
        "algorithm.adv_estimator.",
    )
    order: float | None = option(
        None,
        "Order of training within an update batch: 1 is sorted by length, 0 shuffled; null: 1, but 0 where sorting "
        "biases the gradient.",
    )
    lost_after: float = option(
        300.0,
        "Seconds without an answer after which an agent loop worker or a replica is given up; its samples start "
        "elsewhere.",
    )

    def __post_init__(self) -> None:
        require(
            self.in_flight is None or self.in_flight >= 1, "scheduling.in_flight", self.in_flight, "null, or at least 1"
        )
        allowed = "null, or at least 0 and below 1"
        require(self.put_off is None or 0 <= self.put_off < 1, "scheduling.put_off", self.put_off, allowed)
        require(self.order in (None, 0, 1), "scheduling.order", self.order, "null, 0 or 1")
        for name in ("lost_after", "tool_timeout"):
            require(getattr(self, name) > 0, f"scheduling.{name}", getattr(self, name), "above 0 (seconds)")


@dataclass(frozen=True)
class ElasticConfig:
    """Replicas that rest while generation is ahead of training, and return when it lags (docs/papers/streamrl.md)."""

    min_replicas: int | None = option(
        None, "Replicas that generate, at least; null: all always do. All are launched, and some of them rest."
    )
    max_replicas: int | None = option(None, "Replicas that generate, at most; null: all there are.")

    def __post_init__(self) -> None:
        least, most = self.min_replicas, self.max_replicas
        require(least is None or least >= 1, "streaming.elastic.min_replicas", least, "null, or at least 1")
        allowed = f"null, or at least streaming.elastic.min_replicas ({'null' if least is None else least})"
        require(most is None or (least is not None and most >= least), "streaming.elastic.max_replicas", most, allowed)


@dataclass(frozen=True)
class StreamingConfig:
    """Training while the rest of a batch is generated, where engines are separate."""

    part: float | None = option(
        0.125,
        "Share of an update batch that a streamed part has, at least: its reward, log-probabilities and gradients are "
        "computed while the rest is generated; null: whole batches.",
    )
    elastic: ElasticConfig = field(default_factory=ElasticConfig)

    def __post_init__(self) -> None:
        allowed = "null, or above 0 and at most 1"
        require(self.part is None or 0 < self.part <= 1, "streaming.part", self.part, allowed)


def training_order(order: float | None, mini_batches: int, loss_agg_mode: str, loss_scale_factor: Any = None) -> float:
    """``scheduling.order``, or what ``None`` stands for: what does not bias the gradient (docs/pipeline.md).

    Args:
        order: The option.
        mini_batches: Of an update.
        loss_agg_mode, loss_scale_factor: verl's, of ``actor_rollout_ref.actor``. ``seq-mean-token-sum-norm`` without a
            factor divides each micro-batch by its longest response.
    """
    if order is not None:
        return order
    by_own_tokens = loss_agg_mode == "token-mean" and mini_batches > 1
    by_own_longest = loss_agg_mode == "seq-mean-token-sum-norm" and loss_scale_factor is None
    return 0.0 if by_own_tokens or by_own_longest else 1.0


def trained_unit(unit: str | None, estimator: str) -> Literal["group", "trajectory"]:
    """``scheduling.unit``, or what ``None`` stands for under an ``algorithm.adv_estimator``."""
    return "trajectory" if unit == "trajectory" or (unit is None and estimator in SINGLE_ESTIMATORS) else "group"
