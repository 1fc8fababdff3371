"""The typed configuration: what options there are, their defaults, ranges and contradictions.

:mod:`verl_rhyme.config_tree` reads it from verl's. Over 400 lines, half of them what each option means: so that the
tree stands in one place.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Where the tree lives in verl's config; verl passes it to every rollout worker untouched.
CONFIG_PATH = "actor_rollout_ref.rollout.custom.rhyme"

#: vLLM's own limit on the draft tokens of one request in one step.
MAX_DRAFT_TOKENS = 128

#: Of ``history.max_bytes``, what values may fill; the rest takes a step's new pages before its old ones are free again.
HISTORY_FILL = 0.7

#: Of ``sorting.oversubscription``: what only queues at the engines is aborted and sent again at every update.
MAX_OVERSUBSCRIPTION = 32

#: What ``history.max_bytes=null`` takes: so many bytes, but at most this share of what is free on the disk.
AUTOMATIC_HISTORY_BYTES = 64 << 30
AUTOMATIC_HISTORY_SHARE = 0.5

#: Values of ``drafting.policy``.
DRAFTERS = ("adaptive", "paper")

#: Values of ``sampling.verify``.
VERIFIERS = ("ours", "vllm")

#: Values of ``sorting.mode`` and of ``sorting.unit``.
SORTING_MODES = ("on_policy", "partial", "histopipe", "stream")
SORTING_UNITS = ("group", "trajectory")

#: Values of other keys of ``sorting``.
SORTING_CHOICES: Mapping[str, tuple[str | None, ...]] = {
    "load": ("group", "rolling"),
    "harvest": ("shortest", "loaded", None),
    "start_order": ("load", "longest", "shortest"),
}

#: Values of ``trainer.v1.trainer_mode`` that ``sorting.mode`` works with, and where engines and training then live.
TOPOLOGIES = {"rhyme_sorted": "colocated", "colocate_async": "colocated", "separate_async": "separate"}

#: Values of ``algorithm.adv_estimator`` that look at one trajectory at a time; all others compare a prompt's samples.
SINGLE_ESTIMATORS = ("gae", "reinforce_plus_plus")

#: Values of ``placement.policy``, and the ``placement.options`` of each with their types, as its class has them.
PLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    "least_loaded": {"seed": int | None},
    "sticky_group": {"factor": float},
    "longest_first": {},
    "histopipe": {"groups": int, "two_tier": bool, "migrate": bool, "tail": float},
    "makespan": {"migrate": bool, "gain": float, "sibling_gain": float},
    "skewness_aware": {"objective": str, "pools": int, "tail": float, "late": bool},
}

#: Those that go by forecasts of lengths: a coordinator plans with them.
LENGTH_PLACEMENTS = ("longest_first", "histopipe", "makespan", "skewness_aware")

#: Values of ``lengths.ranker.kind`` and ``lengths.ranker.loss``, as ``lengths/ranker.py`` has these.
RANKERS = ("boosting", "model")
RANKER_LOSSES = ("listwise", "margin", "regression")

#: The arm of a run without rhyme.
STOCK_ARM = "off"


class ConfigError(ValueError):
    """The configuration is wrong; the message says where and how to mend it."""


@dataclass(frozen=True)
class HistoryConfig:
    """What is kept of earlier responses.

    Attributes:
        dir: Node-local folder of the store; ``None`` derives one from the run's checkpoint folder's name.
        max_bytes: Upper bound of the store on each node, in bytes, of which values fill 0.7; the oldest epochs go
            first, then whole prompts by a hash of their key. ``None``: 64 GiB, but at most half of what is free on the
            folder's disk when the run starts. While the file is rewritten the values stand there twice: 1.7 times as
            many bytes. Each checkpoint takes a copy of the values.
        epochs: How many of a prompt's latest epochs are kept.
        timeout: Seconds that training waits for a history writer's answer before it goes on and starts the writer
            anew; for a snapshot or a restore as many more as copying takes at 50 MB/s.
    """

    dir: str | None = None
    max_bytes: int | None = None
    epochs: int = 4
    timeout: float = 300.0

    def __post_init__(self) -> None:
        _require(
            self.max_bytes is None or self.max_bytes >= 1 << 20,
            "history.max_bytes",
            self.max_bytes,
            "null or at least 1048576 (1 MiB)",
        )
        _require(self.epochs >= 1, "history.epochs", self.epochs, "at least 1")
        _require(self.timeout > 0, "history.timeout", self.timeout, "above 0 (seconds)")

    def bound(self, free: int) -> int:
        """``max_bytes``, or what ``None`` stands for on a disk with ``free`` bytes."""
        if self.max_bytes is not None:
            return self.max_bytes
        return max(1 << 20, min(AUTOMATIC_HISTORY_BYTES, int(free * AUTOMATIC_HISTORY_SHARE)))


@dataclass(frozen=True)
class MatchConfig:
    """How much of the latest text must reappear in the history before it is continued (tokens)."""

    min: int = 3
    max: int = 7

    def __post_init__(self) -> None:
        _require(self.min >= 1, "drafting.match.min", self.min, "at least 1")
        _require(self.min <= self.max <= 64, "drafting.match.max", self.max, f"from match.min ({self.min}) to 64")


@dataclass(frozen=True)
class WindowConfig:
    """Draft length per request (RhymeRL section 4, HistoSpec): grows on full acceptance, falls back on rejection."""

    start: int = 2
    growth: int = 2
    max: int = 32

    def __post_init__(self) -> None:
        _require(self.start >= 1, "drafting.window.start", self.start, "at least 1")
        _require(self.growth >= 0, "drafting.window.growth", self.growth, "at least 0")
        _require(
            self.start <= self.max <= MAX_DRAFT_TOKENS,
            "drafting.window.max",
            self.max,
            f"from window.start ({self.start}) to {MAX_DRAFT_TOKENS} (vLLM's limit)",
        )


@dataclass(frozen=True)
class DraftingConfig:
    """HistoSpec.

    Attributes:
        enable: Draft at all; off keeps the recorder and the event log.
        policy: ``"adaptive"``, or ``"paper"`` (RhymeRL, HistoSpec: one source, one window).
        max_tokens: Draft tokens of one request in one step, at most; vLLM reserves room for this many.
        max_batch_tokens: Draft tokens of the whole batch in one step; ``None``: as many as pay, within the two bounds
            of memory and of the step's tokens (``max_num_batched_tokens``).
        logits_memory: Bytes that the logits of draft tokens may take beyond what vLLM has profiled; with vLLM's own
            rejection sampler, the tables it makes of them. The default lets a step be as large as verl's
            ``max_num_batched_tokens`` (8192) at 152k entries in bf16.
        floor: Adaptive: draft a token only if the probability that it is reached and accepted is at least this.
        weigh_cost: Adaptive: draft only what pays, by the cost of a step as measured while running.
        tail_weight: Adaptive: what a draft token is worth, at most, of the request predicted to finish last, where one
            of the mean request is worth 1; 1 weighs all alike.
        live_tokens: Adaptive: running and recent tokens of this engine that are indexed, 20 bytes each at the
            default and 28 at most.
        reward_weight: Paper: votes of a continuation are its count plus this times its mean reward, scaled to [0, 1].
        match, window: Paper: see there.
    """

    enable: bool = True
    policy: str = "adaptive"
    max_tokens: int = 32
    max_batch_tokens: int | None = None
    logits_memory: int = 2 << 30
    floor: float = 0.05
    weigh_cost: bool = True
    tail_weight: float = 2.0
    live_tokens: int = 1 << 22
    reward_weight: float = 1.0
    match: MatchConfig = field(default_factory=MatchConfig)
    window: WindowConfig = field(default_factory=WindowConfig)

    def __post_init__(self) -> None:
        _require(
            1 <= self.max_tokens <= MAX_DRAFT_TOKENS,
            "drafting.max_tokens",
            self.max_tokens,
            f"from 1 to {MAX_DRAFT_TOKENS} (vLLM's limit)",
        )
        _require(
            self.max_batch_tokens is None or self.max_batch_tokens >= 0,
            "drafting.max_batch_tokens",
            self.max_batch_tokens,
            "null or at least 0",
        )
        _require(self.logits_memory >= 1 << 20, "drafting.logits_memory", self.logits_memory, "at least 1 MiB")
        _require(self.policy in DRAFTERS, "drafting.policy", self.policy, " or ".join(DRAFTERS))
        _require(0 < self.floor < 1, "drafting.floor", self.floor, "above 0 and below 1")
        _require(1 <= self.tail_weight <= 100, "drafting.tail_weight", self.tail_weight, "from 1 to 100")
        _require(
            1 << 10 <= self.live_tokens <= 1 << 30, "drafting.live_tokens", self.live_tokens, "from 2**10 to 2**30"
        )
        _require(self.reward_weight >= 0, "drafting.reward_weight", self.reward_weight, "at least 0")
        if self.enable and self.policy == "paper" and self.window.start > self.max_tokens:
            raise ConfigError(
                f"{CONFIG_PATH}: drafting.window.start={self.window.start} contradicts "
                f"drafting.max_tokens={self.max_tokens}: raise max_tokens or lower window.start"
            )


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn and drafts verified.

    Attributes:
        verify: ``"ours"``: one look at each row of logits gives the token and its log-probability, and the token says
            whether the draft holds. ``"vllm"``: vLLM's rejection sampler, to compare; it takes tables of float32 for
            each row and draft length.
        coupled: Sorted on-policy: draw each token with noise keyed by sample and position, so that a response which is
            generated anew repeats itself where the policy did not change.
    """

    verify: str = "ours"
    coupled: bool = False

    def __post_init__(self) -> None:
        _require(self.verify in VERIFIERS, "sampling.verify", self.verify, " or ".join(VERIFIERS))
        _require(
            not self.coupled or self.verify == "ours",
            "sampling.coupled",
            self.coupled,
            "false with sampling.verify=vllm, which draws with noise of its own",
        )


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
            others leave, as many as ``max_staleness`` lets begin (one update batch more than it).
        harvest: ``"shortest"``: an update trains what is finished first. ``"loaded"``: the prompts that were loaded
            first, which it waits for; lengths are trained as they come. ``None``: ``"loaded"`` in histopipe, which has
            no other, and stream, else ``"shortest"``.
        start_order: Which prompts of a load are started first: ``"load"``, as they were loaded, or by the length that
            their earlier responses let expect, ``"longest"`` or ``"shortest"``.
        probe: One sample of a prompt runs first, and the others start when it has come to its end: its length tells
            theirs, which placement goes by.
        order: Order of training within an update batch: 1 is sorted by length, 0 shuffled. ``None``: 1, but 0 where
            several mini-batches are averaged over their own tokens (``loss_agg_mode=token-mean``): sorting biases that.
        redraft: On-policy: draft an interrupted response when it is generated anew.
        keep_running: Partial, histopipe and stream, with engines apart from training and weights by the relay
            (``checkpoint_engine.backend=relay``): what runs at a new version comes to its end under the old one, and
            its replica takes the new one then; else it is cut short and goes on.
        draft_ahead: On-policy, with engines apart from training (``separate_async``): start samples while the actor
            trains. What they say before the new version can only become drafts, and counts as wasted.
        stop_wait: Seconds for which stopped engines wait for samples that are busy elsewhere (a tool, a judge); then
            the sample starts again, and the update goes on without it.
        lost_after: Seconds without an answer after which an agent loop worker is given up, and its samples start again
            elsewhere.
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

    def __post_init__(self) -> None:
        _require(self.mode in (*SORTING_MODES, None), "sorting.mode", self.mode, f"null, {', '.join(SORTING_MODES)}")
        _require(self.unit in (*SORTING_UNITS, None), "sorting.unit", self.unit, f"null, {' or '.join(SORTING_UNITS)}")
        _require(self.group_batches >= 1, "sorting.group_batches", self.group_batches, "at least 1")
        _require(
            1 <= self.oversubscription <= MAX_OVERSUBSCRIPTION,
            "sorting.oversubscription",
            self.oversubscription,
            f"from 1 to {MAX_OVERSUBSCRIPTION}",
        )
        tokens, loaded = self.harvest_tokens, self.harvest == "loaded"
        allowed = "null, or at least 1 with sorting.harvest=shortest"
        _require(tokens is None or (tokens >= 1 and not loaded), "sorting.harvest_tokens", tokens, allowed)
        _require(
            self.max_staleness >= (1 if self.mode == "partial" else 0),
            "sorting.max_staleness",
            self.max_staleness,
            "at least 1 in partial mode, which mixes versions (an on-policy bound is sorting.mode=on_policy)",
        )
        _require(
            self.mode in ("partial", "stream", None) or self.max_staleness <= 1,  # 1 is the default, also there
            "sorting.max_staleness",
            self.max_staleness,
            f"left out with sorting.mode={self.mode}, which has its own (a bound is for sorting.mode=partial)",
        )
        own = ("harvest_tokens", "group_batches", "load") if self.mode in ("histopipe", "stream") else ()
        for name in (*own, *(("max_staleness", "harvest") if self.mode == "histopipe" else ())):
            default = type(self).__dataclass_fields__[name].default
            given = getattr(self, name)
            allowed = f"left out with sorting.mode={self.mode}, which has its own (sorting.mode=partial takes it)"
            _require(given == default, f"sorting.{name}", given, allowed)
        for name, values in SORTING_CHOICES.items():
            value = getattr(self, name)
            near, allowed = _nearest(str(value), filter(None, values)), ", ".join(value or "null" for value in values)
            _require(value in values, f"sorting.{name}", value, f"one of {allowed}", near)
        for name in ("stop_wait", "lost_after"):
            seconds = getattr(self, name)
            _require(seconds > 0, f"sorting.{name}", seconds, "above 0")
        _require(self.order is None or 0 <= self.order <= 1, "sorting.order", self.order, "null, or from 0 to 1")


@dataclass(frozen=True)
class StreamingConfig:
    """Training beside the rollout: what of the next update batch is finished goes through its stages in parts.

    Attributes:
        enable: For updates that train what was loaded (``sorting.mode=stream`` or ``histopipe``), with engines apart
            from the actor. Reward, reference and old log-probabilities then come before the batch is whole.
        update: Gradients, too, where the update is one mini-batch of an estimator that compares a prompt's own samples
            only; the optimizer's step is that of the whole mini-batch.
        part: Share of an update batch that a part has, at least.
    """

    enable: bool = False
    update: bool = True
    part: float = 0.125

    def __post_init__(self) -> None:
        _require(0 < self.part <= 1, "streaming.part", self.part, "above 0, and at most 1")


@dataclass(frozen=True)
class WeightsConfig:
    """Weights by the relay (``checkpoint_engine.backend=relay``), where engines stand at several sites.

    Attributes:
        site_label: Label of Ray nodes that says which site one is at (``ray start --labels="rhyme-site=north"``).
            Nodes without it are at one site. ``None``: all nodes are.
        pack: What goes from site to site is packed, and as what differs from the version before where both ends have
            it; else all bytes go as they are.
        link_patience: Seconds for which a node waits for one that sends nothing, before it asks another or gives up.
    """

    site_label: str | None = "rhyme-site"
    pack: bool = True
    link_patience: float = 600.0

    def __post_init__(self) -> None:
        _require(self.link_patience > 0, "weights.link_patience", self.link_patience, "above 0")
        _require(self.site_label != "", "weights.site_label", self.site_label, "null, or the name of a label")


@dataclass(frozen=True)
class PlacementConfig:
    """Which replica serves a request.

    Attributes:
        policy: A name in :data:`PLACEMENTS` (``scheduling/placement``). ``None``: verl's own router.
        options: Of the policy, by its row in :data:`PLACEMENTS`.
        profile: Of those that go by forecasts: what a replica's work costs, a name of ``simulation/profiles`` or a file
            (``verl-rhyme profile`` makes one of a run). ``None``: a 32B model's over four H800s; only ratios count.
    """

    policy: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    profile: str | None = None

    def __post_init__(self) -> None:
        policies = ", ".join(PLACEMENTS)
        if self.profile is not None:
            allowed = f"null, or placement.policy one of {', '.join(LENGTH_PLACEMENTS)}"
            _require(self.policy in LENGTH_PLACEMENTS, "placement.profile", self.profile, allowed)
        if self.policy is None:
            _require(not self.options, "placement.options", self.options, f"empty without a policy ({policies})")
            return
        near = _nearest(self.policy, PLACEMENTS)
        _require(self.policy in PLACEMENTS, "placement.policy", self.policy, f"null or one of {policies}", near)
        known = PLACEMENTS[self.policy]
        for name in self.options:
            if name not in known:
                whose = [policy for policy, options in PLACEMENTS.items() if name in options]
                hint = f"; it is of {' and '.join(whose)}" if whose else _nearest(name, known)
                has = f"{self.policy} has {', '.join(known) or 'none'}"
                raise ConfigError(f"unknown option {CONFIG_PATH}.placement.options.{name}: {has}{hint}")
        typed = {name: coerce(value, known[name], f"placement.options.{name}") for name, value in self.options.items()}
        object.__setattr__(self, "options", typed)


@dataclass(frozen=True)
class RankerConfig:
    """What is expected of prompts never seen: a length ranker, trained beside the run (StreamRL section 5).

    Attributes:
        enable: For runs that a coordinator drives (``sorting.mode``); what it costs is a process of low priority.
        kind: ``"boosting"``: gradient boosting over features of a prompt. ``"model"``: a small language model.
        model: Of ``kind=model``: a folder of transformers weights with the policy's vocabulary to begin with, or a
            ranker of ``verl-rhyme ranker train``, which serves from the start. ``None``: a tiny one from nothing.
        loss: Of ``kind=model``: ``"listwise"``, ``"margin"``, or ``"regression"`` as published.
        rate: Of ``kind=model``: learning rate.
        refresh: It is trained anew when so many prompts have been answered since.
        most: Prompts that it is trained on, the latest ones.
    """

    enable: bool = False
    kind: str = "boosting"
    model: str | None = None
    loss: str = "listwise"
    rate: float = 1e-3
    refresh: int = 512
    most: int = 8192

    def __post_init__(self) -> None:
        _require(self.kind in RANKERS, "lengths.ranker.kind", self.kind, " or ".join(RANKERS))
        _require(self.loss in RANKER_LOSSES, "lengths.ranker.loss", self.loss, f"one of {', '.join(RANKER_LOSSES)}")
        allowed = "null, or a folder with lengths.ranker.kind=model"
        _require(self.model is None or self.kind == "model", "lengths.ranker.model", self.model, allowed)
        _require(self.rate > 0, "lengths.ranker.rate", self.rate, "above 0")
        _require(self.refresh >= 16, "lengths.ranker.refresh", self.refresh, "at least 16 (prompts)")
        _require(self.most >= self.refresh, "lengths.ranker.most", self.most, f"at least refresh ({self.refresh})")


@dataclass(frozen=True)
class LengthsConfig:
    """Forecasts of lengths."""

    ranker: RankerConfig = field(default_factory=RankerConfig)


@dataclass(frozen=True)
class EventsConfig:
    """The event log.

    Attributes:
        dir: ``None`` writes below ``trainer.default_local_dir``.
        responses: Log the tokens of every trained response as well, about 8 bytes a token, to replay the run with
            ``python -m benchmarks.draft_quality``.
    """

    enable: bool = True
    dir: str | None = None
    responses: bool = False


@dataclass(frozen=True)
class RhymeConfig:
    """Root of the tree. ``enable=false`` leaves stock verl, or somebody's own trainer without our hooks.

    Attributes:
        poll_interval: Seconds between two looks of verl's replay buffer at its queue; ``None`` keeps verl's 2 s.
    """

    enable: bool = True
    poll_interval: float | None = 0.25
    history: HistoryConfig = field(default_factory=HistoryConfig)
    drafting: DraftingConfig = field(default_factory=DraftingConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sorting: SortingConfig = field(default_factory=SortingConfig)
    streaming: StreamingConfig = field(default_factory=StreamingConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    lengths: LengthsConfig = field(default_factory=LengthsConfig)
    events: EventsConfig = field(default_factory=EventsConfig)

    def __post_init__(self) -> None:
        _require(
            self.poll_interval is None or self.poll_interval > 0, "poll_interval", self.poll_interval, "null or above 0"
        )
        allowed = "false without sorting.mode (+rhyme=sorted, histopipe, stream): verl's own order asks no forecast"
        _require(not self.lengths.ranker.enable or bool(self.sorting.mode), "lengths.ranker.enable", True, allowed)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dict; :func:`verl_rhyme.config_tree.parse` reads it back."""
        return dataclasses.asdict(self)


def sorting_unit(unit: str | None, estimator: str) -> str:
    """``sorting.unit``, or what ``None`` stands for under an ``algorithm.adv_estimator``."""
    return unit or ("trajectory" if estimator in SINGLE_ESTIMATORS else "group")


def coerce(value: Any, hint: Any, path: str) -> Any:
    """A value of the tree as its type: whole numbers may be written as floats, and floats as whole numbers.

    Args:
        value: As the config has it.
        hint: A type, or a union of some.
        path: Of the key.

    Raises:
        ConfigError: It is of another type, or not finite.
    """
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in allowed:
        return None
    for kind in allowed:
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ConfigError(f"{CONFIG_PATH}.{path} must be finite, not {value!r}")
            return float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, typing.get_origin(kind) or kind) and not (kind is int and isinstance(value, bool)):
            return value
    names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
    raise ConfigError(f"{CONFIG_PATH}.{path} must be {names}, not {value!r}")


def _require(ok: bool, path: str, value: Any, allowed: str, hint: str = "") -> None:
    if not ok:
        raise ConfigError(f"{CONFIG_PATH}.{path} must be {allowed}, not {value!r}{hint}")


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
