"""Options of the history, of drafts, and of how these are verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_rhyme.config.checks import option, require

#: vLLM's own limit on the draft tokens of one request in one step.
MAX_DRAFT_TOKENS = 128

#: Of ``history.max_bytes``, what values may fill; the rest takes a step's new pages before its old ones are free again.
HISTORY_FILL = 0.7


@dataclass(frozen=True)
class HistoryConfig:
    """Earlier responses of each prompt, from which drafts and expected lengths come."""

    dir: str | None = option(
        None,
        "Node-local folder of the history; null: TMPDIR/verl_rhyme-UID/HASH, by the run's checkpoint folder. It is "
        "working space: what lasts is in the checkpoints.",
        public=True,
    )
    max_bytes: int | None = option(
        None,
        "Bytes that the history may take on the trainer's node (and its copies on each other node); the oldest visits "
        "go first. null: half of what disk or memory have free at the start, whichever is less; each of several Ray "
        "nodes on one machine takes half of what the others left.",
        public=True,
    )
    epochs: int = option(
        4, "Latest visits of a prompt that are kept: one an epoch, more where data repeat prompts.", public=True
    )

    def __post_init__(self) -> None:
        allowed = "null or at least 1048576 (1 MiB)"
        require(self.max_bytes is None or self.max_bytes >= 1 << 20, "history.max_bytes", self.max_bytes, allowed)
        require(self.epochs >= 1, "history.epochs", self.epochs, "at least 1")

    def bound(self, disk: int, memory: int) -> int:
        """``max_bytes``, or what ``None`` stands for where so many bytes are free."""
        if self.max_bytes is not None:
            return self.max_bytes
        return max(1 << 20, min(disk, memory) // 2)


@dataclass(frozen=True)
class DraftingConfig:
    """HistoSpec: drafts from the history and from other live texts, verified by the model (lossless)."""

    enable: bool = option(True, "Draft; false keeps the recorder and the event log.", public=True)
    max_tokens: int = option(32, "Draft tokens of one request in one step, at most (vLLM allows 128).", public=True)
    floor: float = option(
        0.05,
        "Least probability, to be reached and accepted, of a draft token (policy=adaptive).",
        public=True,
    )
    policy: Literal["adaptive", "paper"] = option(
        "adaptive", "Drafter: adaptive, or paper (HistoSpec as RhymeRL publishes it: one source, one window)."
    )
    max_batch_tokens: int | None = option(
        None, "Draft tokens of the whole batch in one step, at most; null: as many as are profitable."
    )
    logits_memory: int = option(
        2 << 30,
        "Bytes that the logits of draft tokens may take beyond what vLLM has profiled; the default lets a step have "
        "8192 tokens at 152k entries in bf16.",
    )
    weigh_cost: bool = option(True, "Draft only what is profitable by the measured cost of a step (policy=adaptive).")
    plan_threads: int | None = option(
        None,
        "Threads that plan a batch's drafts; null: half of an engine worker's cores, 4 at most (policy=adaptive).",
    )
    wait_for_history: bool = option(
        False,
        "Read a prompt's history while the engine waits; false: another thread reads it, and drafts then depend on "
        "time, never what is generated.",
    )
    live_tokens: int = option(
        1 << 22, "Running and recent tokens of an engine that are indexed, 20 to 32 bytes each (policy=adaptive)."
    )
    head: str | None = option(
        None,
        "A draft head, which guesses from the policy's hidden states and is trained by the engine (policy=adaptive): "
        "new, or a file of one to begin with; null: none. A run that goes on begins with its own.",
        public=True,
    )

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, allowed: str) -> None:
            require(ok, f"drafting.{name}", getattr(self, name), allowed)

        check(1 <= self.max_tokens <= MAX_DRAFT_TOKENS, "max_tokens", f"from 1 to {MAX_DRAFT_TOKENS} (vLLM's limit)")
        check(self.max_batch_tokens is None or self.max_batch_tokens >= 0, "max_batch_tokens", "null or at least 0")
        check(self.plan_threads is None or self.plan_threads >= 1, "plan_threads", "null or at least 1")
        check(self.logits_memory >= 1 << 20, "logits_memory", "at least 1048576 (1 MiB)")
        check(0 < self.floor < 1, "floor", "above 0 and below 1")
        check(1 << 10 <= self.live_tokens <= 1 << 30, "live_tokens", "from 2**10 to 2**30")
        check(self.head != "", "head", "null, new, or a file")
        check(self.head is None or self.policy == "adaptive", "head", "null with drafting.policy=paper")


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn while drafting is on."""

    coupled: bool | None = option(
        None,
        "Noise keyed by sample and position, so that a regenerated response repeats itself where the policy did not "
        "change; null: wherever responses are regenerated (max_staleness=0) and drafting is on.",
    )
