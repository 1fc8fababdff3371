"""Options of what is kept of earlier responses, of drafts, and of how they are verified."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_rhyme.config.checks import CONFIG_PATH, ConfigError, require

#: vLLM's own limit on the draft tokens of one request in one step.
MAX_DRAFT_TOKENS = 128

#: Of ``history.max_bytes``, what values may fill; the rest takes a step's new pages before its old ones are free again.
HISTORY_FILL = 0.7

#: What ``history.max_bytes=null`` takes: this share of the disk and of the memory that are free, the smaller one.
AUTOMATIC_HISTORY_SHARE = 0.5

#: Values of ``drafting.policy``.
DRAFTERS = ("adaptive", "paper")

#: Values of ``sampling.verify``.
VERIFIERS = ("ours", "vllm")


@dataclass(frozen=True)
class HistoryConfig:
    """What is kept of earlier responses.

    Attributes:
        dir: Node-local folder of the store; ``None`` derives one from the run's checkpoint folder's name.
        max_bytes: Upper bound, in bytes, of the store on the trainer's node, of which values fill 0.7; the oldest
            visits go first, then whole prompts by a hash of their key. ``None``: half of what is free, when the run
            starts, of the folder's disk or of memory, whichever is less; nodes that share a disk or a machine share
            that half. It also bounds, on each other node, the copies of histories that its replicas' requests need.
            While the file is rewritten the values stand there twice: 1.7 times as many bytes. Each checkpoint takes a
            copy of the values.
        epochs: How many of a prompt's latest visits are kept: one an epoch, or more where the data repeat prompts.
        timeout: Seconds that the history writer has for a piece of an update (128 MiB), which is a deadline by
            progress: then it is started anew; for a snapshot or a restore as many more as copying takes at 50 MB/s.
    """

    dir: str | None = None
    max_bytes: int | None = None
    epochs: int = 4
    timeout: float = 300.0

    def __post_init__(self) -> None:
        require(
            self.max_bytes is None or self.max_bytes >= 1 << 20,
            "history.max_bytes",
            self.max_bytes,
            "null or at least 1048576 (1 MiB)",
        )
        require(self.epochs >= 1, "history.epochs", self.epochs, "at least 1")
        require(self.timeout > 0, "history.timeout", self.timeout, "above 0 (seconds)")

    def bound(self, disk: int, memory: int) -> int:
        """``max_bytes``, or what ``None`` stands for where so many bytes are free and no other node shares them."""
        if self.max_bytes is not None:
            return self.max_bytes
        return max(1 << 20, int(AUTOMATIC_HISTORY_SHARE * min(disk, memory)))


@dataclass(frozen=True)
class MatchConfig:
    """How much of the latest text must reappear in the history before it is continued (tokens)."""

    min: int = 3
    max: int = 7

    def __post_init__(self) -> None:
        require(self.min >= 1, "drafting.match.min", self.min, "at least 1")
        require(self.min <= self.max <= 64, "drafting.match.max", self.max, f"from match.min ({self.min}) to 64")


@dataclass(frozen=True)
class WindowConfig:
    """Draft length per request (RhymeRL section 4, HistoSpec): grows on full acceptance, falls back on rejection."""

    start: int = 2
    growth: int = 2
    max: int = 32

    def __post_init__(self) -> None:
        require(self.start >= 1, "drafting.window.start", self.start, "at least 1")
        require(self.growth >= 0, "drafting.window.growth", self.growth, "at least 0")
        require(
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
        plan_threads: Adaptive: threads that plan a batch's drafts, at most as many as the cores that an engine's worker
            may use; ``None``: half of those, 4 at most. The drafts are the same with any number.
        wait_for_history: Read a prompt's history when its first request starts, while the engine waits. Otherwise
            another thread does, and the request drafts from what else there is until its history is there; what is
            drafted, never what is generated, then depends on time.
        live_tokens: Adaptive: running and recent tokens of this engine that are indexed, 20 bytes each at the
            default and 32 at most.
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
    plan_threads: int | None = None
    wait_for_history: bool = False
    live_tokens: int = 1 << 22
    reward_weight: float = 1.0
    match: MatchConfig = field(default_factory=MatchConfig)
    window: WindowConfig = field(default_factory=WindowConfig)

    def __post_init__(self) -> None:
        require(
            1 <= self.max_tokens <= MAX_DRAFT_TOKENS,
            "drafting.max_tokens",
            self.max_tokens,
            f"from 1 to {MAX_DRAFT_TOKENS} (vLLM's limit)",
        )
        require(
            self.max_batch_tokens is None or self.max_batch_tokens >= 0,
            "drafting.max_batch_tokens",
            self.max_batch_tokens,
            "null or at least 0",
        )
        require(
            self.plan_threads is None or self.plan_threads >= 1,
            "drafting.plan_threads",
            self.plan_threads,
            "null or at least 1",
        )
        require(self.logits_memory >= 1 << 20, "drafting.logits_memory", self.logits_memory, "at least 1 MiB")
        require(self.policy in DRAFTERS, "drafting.policy", self.policy, " or ".join(DRAFTERS))
        require(0 < self.floor < 1, "drafting.floor", self.floor, "above 0 and below 1")
        require(1 <= self.tail_weight <= 100, "drafting.tail_weight", self.tail_weight, "from 1 to 100")
        require(1 << 10 <= self.live_tokens <= 1 << 30, "drafting.live_tokens", self.live_tokens, "from 2**10 to 2**30")
        require(self.reward_weight >= 0, "drafting.reward_weight", self.reward_weight, "at least 0")
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
            regenerated repeats itself where the policy did not change. ``None``: wherever that is possible
            (:attr:`RhymeConfig.coupled <verl_rhyme.config.RhymeConfig.coupled>`).
    """

    verify: str = "ours"
    coupled: bool | None = None

    def __post_init__(self) -> None:
        require(self.verify in VERIFIERS, "sampling.verify", self.verify, " or ".join(VERIFIERS))
        require(
            not self.coupled or self.verify == "ours",
            "sampling.coupled",
            self.coupled,
            "false with sampling.verify=vllm, which draws with noise of its own",
        )
