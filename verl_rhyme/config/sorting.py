"""Options of what is generated when, of what an update trains, and of training beside the rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_rhyme.config.checks import nearest, require

#: Values of ``sorting.mode`` and of ``sorting.unit``.
SORTING_MODES = ("on_policy", "partial", "histopipe", "stream")


SORTING_UNITS = ("group", "trajectory")

#: Values of other keys of ``sorting``.
SORTING_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "load": ("group", "rolling", "refill"),
    "harvest": ("shortest", "loaded", None),
    "start_order": ("load", "longest", "shortest"),
}

#: Of ``sorting.oversubscription``: what only queues at the engines is aborted and sent again at every update.
MAX_OVERSUBSCRIPTION = 32

#: Values of ``trainer.v1.trainer_mode`` that ``sorting.mode`` works with, and where engines and training then live.
TOPOLOGIES = {"rhyme_sorted": "colocated", "colocate_async": "colocated", "separate_async": "separate"}

#: Values of ``algorithm.adv_estimator`` that look at one trajectory at a time; all others compare a prompt's samples.
SINGLE_ESTIMATORS = ("gae", "reinforce_plus_plus")


@dataclass(frozen=True)
class SortingConfig:
    """SortedRL, in a trainer mode of :data:`TOPOLOGIES` (``+rhyme=sorted`` sets ``rhyme_sorted``).

    Attributes:
        mode: A set of rules by its name (``scheduling/rules.py``). ``"on_policy"``: only what the current policy made
            is trained, an interrupted response is generated anew. ``"partial"``: it goes on where it stood.
            ``"histopipe"``: updates as they were loaded; of engines apart from the actor each begins its share of the
            next one when its share of this one is done (``load`` is ``rolling`` then, ``max_staleness`` 1), else a step
            is strictly synchronous. ``"stream"``: updates as they were loaded, with engines apart from the actor; with
            ``max_staleness=0`` nothing runs when the policy changes, else prompts are loaded as others leave
            (``harvest="shortest"`` trains what is finished first). ``None``: verl's trainer modes as they are.
        group_batches: Update batches (``data.train_batch_size`` prompts each) that are loaded together; no more before
            all are trained.
        oversubscription: Samples that the engines are given at a time, as a multiple of their request slots, and of
            what their KV caches hold: above 1, so that a slot that falls free is taken at once.
        unit: What stays together in an update batch: ``"group"`` (all samples of a prompt), ``"trajectory"``, or
            ``None``: by ``algorithm.adv_estimator``, groups where it compares the samples of a prompt.
        harvest_tokens: Update as well when so many response tokens are finished; ``None``: full batches only.
        max_staleness: Partial and stream: policy versions between a trained token and the policy it trains, at most.
        load: ``"group"``: ``group_batches`` together, and no others before all of these are trained. ``"rolling"``: as
            others leave, as many as ``max_staleness`` lets begin (one update batch more than it). ``"refill"``: as
            others leave, ``group_batches`` at all times: long ones may wait until no prompts are left (an ablation).
        harvest: ``"shortest"``: an update trains what is finished first. ``"loaded"``: the prompts that were loaded
            first, which it waits for; lengths are trained as they come. ``None``: ``"loaded"`` in histopipe, which has
            no other, and stream, else ``"shortest"``.
        start_order: Which prompts of a load are started first: ``"load"``, as they were loaded, or by the length that
            their earlier responses let expect, ``"longest"`` or ``"shortest"``.
        probe: One sample of a prompt runs first, and the others start when it has come to its end: its length tells
            theirs, which placement goes by.
        order: Order of training within an update batch: 1 is sorted by length, 0 shuffled. ``None``: 1, but 0 where
            sorting biases the gradient (:func:`sorting_order`).
        redraft: On-policy: draft an interrupted response when it is generated anew.
        keep_running: Partial, histopipe and stream, with engines apart from training and weights by the relay
            (``checkpoint_engine.backend=relay``): what runs at a new version comes to its end under the old one, and
            its replica takes the new one then; else it is cut short and goes on.
        draft_ahead: On-policy, with engines apart from training (``separate_async``): start samples while the actor
            trains. What they say before the new version can only become drafts, and counts as wasted.
        stop_wait: Seconds for which stopped engines wait for samples that are busy elsewhere (a tool, a judge); then
            the sample starts again, and the update goes on without it.
        lost_after: Seconds without an answer after which an agent loop worker or a replica is given up, and its samples
            start again elsewhere.
        tool_timeout: Seconds that a sample may wait for a tool or its reward, at one time and not counting generation;
            then it fails, in verl's trainer modes too.
    """

    mode: str | None = None
    group_batches: int = 4
    oversubscription: float = 2.0
    unit: str | None = None
    harvest_tokens: int | None = None
    max_staleness: int = 1
    load: str = "group"
    harvest: str | None = None
    start_order: str = "load"
    probe: bool = False
    order: float | None = None
    redraft: bool = True
    keep_running: bool = False
    draft_ahead: bool = False
    stop_wait: float = 30.0
    lost_after: float = 300.0
    tool_timeout: float = 3600.0

    def __post_init__(self) -> None:
        require(self.mode in (*SORTING_MODES, None), "sorting.mode", self.mode, f"null, {', '.join(SORTING_MODES)}")
        require(self.unit in (*SORTING_UNITS, None), "sorting.unit", self.unit, f"null, {' or '.join(SORTING_UNITS)}")
        require(self.group_batches >= 1, "sorting.group_batches", self.group_batches, "at least 1")
        require(
            1 <= self.oversubscription <= MAX_OVERSUBSCRIPTION,
            "sorting.oversubscription",
            self.oversubscription,
            f"from 1 to {MAX_OVERSUBSCRIPTION}",
        )
        tokens, loaded = self.harvest_tokens, self.harvest == "loaded"
        allowed = "null, or at least 1 with sorting.harvest=shortest"
        require(tokens is None or (tokens >= 1 and not loaded), "sorting.harvest_tokens", tokens, allowed)
        require(
            self.max_staleness >= (1 if self.mode == "partial" else 0),
            "sorting.max_staleness",
            self.max_staleness,
            "at least 1 in partial mode, which mixes versions (an on-policy bound is sorting.mode=on_policy)"
            if self.mode == "partial"
            else "at least 0",
        )
        require(
            self.mode in ("partial", "stream", None) or self.max_staleness <= 1,  # 1 is the default, also there
            "sorting.max_staleness",
            self.max_staleness,
            f"left out with sorting.mode={self.mode}, which has its own (a bound is for sorting.mode=partial)",
        )
        own = ("harvest_tokens", "group_batches", "load") if self.mode in ("histopipe", "stream") else ()
        for name in (*own, *(("max_staleness", "harvest") if self.mode == "histopipe" else ())):
            allowed = f"left out with sorting.mode={self.mode}, which has its own (sorting.mode=partial takes it)"
            require(self._left_out(name), f"sorting.{name}", getattr(self, name), allowed)
        rolls = self.load == "rolling"
        allowed = "left out with sorting.load=rolling, which loads as much as sorting.max_staleness lets begin"
        left_out = self._left_out("group_batches")
        require(not rolls or left_out, "sorting.group_batches", self.group_batches, allowed)
        allowed = (
            "group with sorting.mode=on_policy: nothing may begin before its policy (sorting.mode=partial trains it)"
        )
        require(not (rolls and self.mode == "on_policy"), "sorting.load", self.load, allowed)
        for name, values in SORTING_CHOICES.items():
            value = getattr(self, name)
            near, allowed = nearest(str(value), filter(None, values)), ", ".join(value or "null" for value in values)
            require(value in values, f"sorting.{name}", value, f"one of {allowed}", near)
        for name in ("stop_wait", "lost_after", "tool_timeout"):
            seconds = getattr(self, name)
            require(seconds > 0, f"sorting.{name}", seconds, "above 0")
        require(self.order is None or 0 <= self.order <= 1, "sorting.order", self.order, "null, or from 0 to 1")

    def _left_out(self, name: str) -> bool:
        """An option is at its default."""
        return bool(getattr(self, name) == type(self).__dataclass_fields__[name].default)


@dataclass(frozen=True)
class ElasticConfig:
    """Replicas that rest while generation is ahead of training, and return when it falls behind (docs/planning.md).

    Attributes:
        enable: Where rollout goes on while the actor trains: let the elastic rule decide after each step. All replicas
            are launched, and some of them rest.
        least, most: Replicas that generate; ``most=None``: all there are.
        start: Those that generate at the beginning, also of a resumed run; ``None``: as many as may.
        window: Steps whose medians the rule goes by.
    """

    enable: bool = False
    least: int = 1
    most: int | None = None
    start: int | None = None
    window: int = 4

    def __post_init__(self) -> None:
        require(self.least >= 1, "streaming.elastic.least", self.least, "at least 1")
        allowed = f"null, or at least streaming.elastic.least ({self.least})"
        require(self.most is None or self.most >= self.least, "streaming.elastic.most", self.most, allowed)
        start, most = self.start, self.most
        allowed = f"null, or from streaming.elastic.least ({self.least}) to most ({'all' if most is None else most})"
        fits = start is None or (start >= self.least and (most is None or start <= most))
        require(fits, "streaming.elastic.start", start, allowed)
        require(self.window >= 1, "streaming.elastic.window", self.window, "at least 1 (step)")


@dataclass(frozen=True)
class StreamingConfig:
    """Training beside the rollout: what of the next update batch is finished goes through its stages in parts.

    Attributes:
        enable: For updates that train what was loaded (``sorting.mode=stream`` or ``histopipe``), with engines apart
            from the actor. Reward, reference and old log-probabilities then come before the batch is whole.
        update: Gradients, too, where the update is one mini-batch of an estimator that compares a prompt's own samples
            only; the optimizer's step is that of the whole mini-batch.
        part: Share of an update batch that a part has, at least.
        elastic: Replicas that rest and return; goes without the rest of this section.
    """

    enable: bool = False
    update: bool = True
    part: float = 0.125
    elastic: ElasticConfig = field(default_factory=ElasticConfig)

    def __post_init__(self) -> None:
        require(0 < self.part <= 1, "streaming.part", self.part, "above 0, and at most 1")


def sorting_order(order: float | None, mini_batches: int, loss_agg_mode: str, loss_scale_factor: Any = None) -> float:
    """``sorting.order``, or what ``None`` stands for: what does not bias the gradient (docs/sorted.md).

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


def sorting_unit(unit: str | None, estimator: str) -> str:
    """``sorting.unit``, or what ``None`` stands for under an ``algorithm.adv_estimator``."""
    return unit or ("trajectory" if estimator in SINGLE_ESTIMATORS else "group")
