"""Options of the history and of drafting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from verl_rhyme.config.checks import option, require_each

#: Limit of vLLM: draft tokens per request and step.
MAX_DRAFT_TOKENS = 128

#: Largest draft of ``policy=paper``: the window as published.
PAPER_DRAFT_TOKENS = 32

#: Share of ``history.max_bytes`` for values; a step writes new pages into the rest before its old pages are free.
HISTORY_FILL = 0.7


@dataclass(frozen=True)
class HistoryConfig:
    """Earlier responses of each prompt, the source of drafts and of expected lengths."""

    dir: str | None = option(
        None,
        "Node-local working folder of the history. null: verl_rhyme-UID/HASH, where HASH is of the run's checkpoint "
        "folder, in the first of TMPDIR, /var/tmp and /dev/shm that can hold it. Checkpoints hold the permanent copy.",
        public=True,
    )
    max_bytes: int | None = option(
        None,
        "Maximum size of the history in bytes on the trainer's node, and of its copy on each other node. The oldest "
        "visits are evicted first. null: half of the free disk or half of the free memory at the start, whichever is "
        "less.",
        public=True,
    )
    epochs: int = option(4, "Visits of a prompt to keep, the latest ones. Usually a visit is an epoch.", public=True)

    def __post_init__(self) -> None:
        require_each(
            "history",
            self,
            max_bytes=(self.max_bytes is None or self.max_bytes >= 1 << 20, "null or at least 1048576 (1 MiB)"),
            epochs=(self.epochs >= 1, "at least 1"),
        )


@dataclass(frozen=True)
class DraftingConfig:
    """HistoSpec: lossless drafts from the history and from the live texts, verified by the model."""

    enable: bool = option(True, "Enable drafting. false keeps the history and the event log.", public=True)
    max_tokens: int = option(32, "Maximum draft tokens per request and step (limit of vLLM: 128).", public=True)
    floor: float = option(
        0.05,
        "Minimum probability that a draft token is reached and accepted (policy=adaptive).",
        public=True,
    )
    model: str | None = option(
        None,
        "The model's own drafter, as one more source of drafts: mtp (layers of the checkpoint), or the folder of an "
        "EAGLE head or a small model. null: mtp if verl's mtp.enable_rollout is set, else none.",
        public=True,
    )
    model_tokens: int = option(3, "Tokens that the model's own drafter drafts per request and step.")
    policy: Literal["adaptive", "paper"] = option(
        "adaptive", "Drafter: adaptive, or paper (HistoSpec as published by RhymeRL: one source, one window)."
    )
    max_batch_tokens: int | None = option(
        None, "Maximum draft tokens per step of the whole batch. null: as many as are profitable."
    )
    logits_memory: int = option(
        2 << 30,
        "Bytes for the logits of draft tokens in addition to vLLM's profiled memory. The default holds 8192 tokens in "
        "bf16 with a vocabulary of 152k entries.",
    )
    weigh_cost: bool = option(True, "Draft only if the measured step cost makes drafts profitable (policy=adaptive).")
    plan_threads: int | None = option(
        None,
        "Threads that plan the drafts of a batch (policy=adaptive). null: half of the engine worker's cores, at most "
        "4.",
    )
    wait_for_history: bool = option(
        False,
        "Let the engine wait until a prompt's history is read. false: another thread reads the history. Drafts then "
        "depend on timing, but the generated tokens do not.",
    )
    history_memory: int = option(
        4 << 30,
        "Bytes of decoded histories per engine, 12 to 16 per token. A prompt beyond them drafts from other texts until "
        "others are done.",
    )
    live_tokens: int = option(
        1 << 22, "Running and recent tokens per engine in the index, 20 to 32 bytes each (policy=adaptive)."
    )

    def __post_init__(self) -> None:
        require_each(
            "drafting",
            self,
            max_tokens=(1 <= self.max_tokens <= MAX_DRAFT_TOKENS, f"from 1 to {MAX_DRAFT_TOKENS} (vLLM's limit)"),
            model_tokens=(1 <= self.model_tokens <= MAX_DRAFT_TOKENS, f"from 1 to {MAX_DRAFT_TOKENS}"),
            max_batch_tokens=(
                self.max_batch_tokens is None or self.max_batch_tokens >= 1,
                "null or at least 1 (no drafts: set drafting.enable=false)",
            ),
            plan_threads=(self.plan_threads is None or self.plan_threads >= 1, "null or at least 1"),
            logits_memory=(self.logits_memory >= 1 << 20, "at least 1048576 (1 MiB)"),
            history_memory=(self.history_memory >= 1 << 20, "at least 1048576 (1 MiB)"),
            floor=(0 < self.floor < 1, "above 0 and below 1"),
            live_tokens=(1 << 10 <= self.live_tokens <= 1 << 30, "from 2**10 to 2**30"),
        )
        if self.policy == "paper":
            most = self.max_tokens <= PAPER_DRAFT_TOKENS, f"at most {PAPER_DRAFT_TOKENS} with policy=paper"
            require_each("drafting", self, max_tokens=most)
            for name in ("floor", "model", "weigh_cost", "plan_threads", "live_tokens"):
                default = getattr(DraftingConfig, name)
                allowed = f"{'null' if default is None else default} (its default) with policy=paper, which ignores it"
                require_each("drafting", self, **{name: (getattr(self, name) == default, allowed)})
