"""Options of the pipeline: prompts in flight, the samples of each training batch, streamed training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from verl_rhyme.config.checks import option, require_each

#: Samples sent to the engines, as a multiple of their request slots and KV cache capacity. Above 1, so that a free
#: slot is filled at once.
OVERSUBSCRIPTION = 2.0

#: Values of ``trainer.v1.trainer_mode``, each with the place of the engines.
TOPOLOGIES = {"sync": "colocated", "colocate_async": "colocated", "separate_async": "separate"}

#: Values of ``algorithm.adv_estimator`` that use one trajectory at a time; all others compare a prompt's samples.
SINGLE_ESTIMATORS = ("gae", "reinforce_plus_plus")


@dataclass(frozen=True)
class SchedulingConfig:
    """Scheduling by the pipeline (``max_staleness`` not null); verl's own schedule uses only the timeouts.

    The papers' presets set these options; the preset ``full`` keeps the defaults.
    """

    tool_timeout: float = option(
        3600.0,
        "Seconds that a sample may wait for a tool or its reward, without generation time. Then the sample fails.",
        public=True,
    )
    in_flight: float | None = option(
        None,
        "Maximum training batches of prompts in flight; fractions are allowed. null: max(2, 1 + max_staleness / 2), "
        "or max_staleness + 1 with take=loaded. With max_staleness=0: 3 with refill=when_empty, 1.125 with put_off, "
        "else 1.",
    )
    put_off: float = option(
        0.0,
        "Tail batching (max_staleness=0): share of prompts that wait for a separate batch, those with the longest "
        "expected responses.",
    )
    take: Literal["finished", "loaded"] = option(
        "finished", "Order of training: the groups that finish first, or the prompts that started first (loaded)."
    )
    refill: Literal["always", "when_empty"] | None = option(
        None,
        "When new prompts start: at every policy version, or when all prompts in flight are trained. null: always. "
        "With max_staleness=0: when_empty, but always with put_off or take=loaded.",
    )
    at_version: Literal["continue", "finish", "regenerate"] | None = option(
        None,
        "Running responses at a new policy version: continue under it, finish under the old one (separate engines, "
        "weights by the relay), or regenerate. null: continue. With max_staleness=0: regenerate, or finish where no "
        "response runs at a new version.",
    )
    unit: Literal["group", "trajectory"] | None = option(
        None,
        "Unit of a training batch: group keeps a prompt's samples together, trajectory does not. null: chosen by "
        "algorithm.adv_estimator and filter_groups.",
    )
    order: float | None = option(
        None,
        "Order within a training batch: 1 sorts by length, 0 shuffles. null: 1, or 0 where sorting biases the "
        "gradient.",
    )
    lost_after: float = option(
        300.0,
        "Seconds without an answer after which an agent loop worker or a replica counts as lost. Other workers or "
        "replicas restart its samples.",
    )

    outage_timeout: float = option(
        900.0,
        "Seconds without a successful sample after which the run ends, if agent loops or rewards raise. Until then "
        "failed samples start again, and few prompts are replaced. A validation goes on without the failed samples.",
    )

    def __post_init__(self) -> None:
        require_each(
            "scheduling",
            self,
            in_flight=(self.in_flight is None or self.in_flight >= 1, "null, or at least 1"),
            put_off=(0 <= self.put_off < 1, "at least 0 and below 1"),
            order=(self.order in (None, 0, 1), "null, 0 or 1"),
            lost_after=(self.lost_after > 0, "above 0 (seconds)"),
            tool_timeout=(self.tool_timeout > 0, "above 0 (seconds)"),
            outage_timeout=(self.outage_timeout > 0, "above 0 (seconds)"),
        )


@dataclass(frozen=True)
class ElasticConfig:
    """Replicas that pause while generation is ahead of training, and resume when it lags (docs/papers/streamrl.md)."""

    min_replicas: int | None = option(
        None, "Minimum replicas that generate; all replicas are launched, and some pause. null: no replica pauses."
    )
    max_replicas: int | None = option(None, "Maximum replicas that generate. null: all replicas.")

    def __post_init__(self) -> None:
        least, most = self.min_replicas, self.max_replicas
        require_each(
            "streaming.elastic",
            self,
            min_replicas=(least is None or least >= 1, "null, or at least 1"),
            max_replicas=(
                most is None or (least is not None and most >= least),
                f"null, or at least streaming.elastic.min_replicas ({'null' if least is None else least})",
            ),
        )


@dataclass(frozen=True)
class StreamingConfig:
    """Streamed training with separate engines: train parts of a batch while the rest is generated."""

    part: float | None = option(
        0.125,
        "Minimum size of a streamed part, as a share of the training batch. Rewards, log-probabilities and gradients "
        "of a part are computed while the rest is generated. null: whole batches.",
    )
    elastic: ElasticConfig = field(default_factory=ElasticConfig)

    def __post_init__(self) -> None:
        require_each(
            "streaming", self, part=(self.part is None or 0 < self.part <= 1, "null, or above 0 and at most 1")
        )


def training_order(order: float | None, mini_batches: int, loss_agg_mode: str, loss_scale_factor: Any = None) -> float:
    """Return ``scheduling.order``, or its default, which does not bias the gradient (docs/pipeline.md).

    ``mini_batches`` are those of a training step, ``loss_agg_mode`` and ``loss_scale_factor`` options of verl's actor:
    ``seq-mean-token-sum-norm`` without a factor divides each micro-batch by its longest response.
    """
    if order is not None:
        return order
    by_own_tokens = loss_agg_mode == "token-mean" and mini_batches > 1
    by_own_longest = loss_agg_mode == "seq-mean-token-sum-norm" and loss_scale_factor is None
    return 0.0 if by_own_tokens or by_own_longest else 1.0


def trained_unit(unit: str | None, estimator: str, filters: bool) -> Literal["group", "trajectory"]:
    """Return ``scheduling.unit``, or its default for ``algorithm.adv_estimator`` and ``filter_groups.enable``."""
    alone = estimator in SINGLE_ESTIMATORS and not filters if unit is None else unit == "trajectory"
    return "trajectory" if alone else "group"
