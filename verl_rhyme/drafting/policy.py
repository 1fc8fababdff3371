"""Draft policies: the interface between the engine's proposer and the drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from verl_rhyme.history.record import PromptHistory

#: Sources of draft tokens: earlier responses of the prompt, other samples of its group, the request's own text, other
#: prompts' texts, the model's own drafter. A token that several sources propose counts for the first of them.
SOURCES = ("history", "siblings", "own", "others", "model")


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What drafting did for one request; columns of its record of the same names."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verify_steps: int = 0  # steps that verified a draft
    history_hit: bool = False  # its prompt had a history
    reverified_tokens: int = 0  # accepted tokens that were drafted from the request's previous text
    # [sources, 2]: drafted and accepted tokens by source (SOURCES), without those from the request's previous text.
    by_source: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in SOURCES])


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A finished decode step, with the bounds of the next drafts."""

    requests: Sequence[str]  # B started requests
    rows: np.ndarray  # int[B], rows of the requests in ``tokens``
    tokens: np.ndarray  # int32[rows, positions], prompt and response of each, C-contiguous
    lengths: np.ndarray  # int[B], tokens of each request so far
    drafted: Sequence[int] | np.ndarray  # int[B], of the step; 0 without a draft
    accepted: Sequence[int] | np.ndarray  # int[B]
    limits: np.ndarray  # int[B], most draft tokens of each request (bounds.request_limits)
    budget: int  # most draft tokens of the batch
    seconds: float | None = None  # of the step without its plan; None after a pause
    planning: float = 0.0  # seconds of the plan before it
    prefilled: int = 0  # prompt tokens that the step computed
    waited: bool = False  # whether it began after the tokens before it were known, and yet had no drafts
    next_launched: bool = False  # whether the next step has begun: it will have no drafts
    chains: np.ndarray | None = None  # int32[B, k], the model's drafts after the step; its time is part of ``seconds``


class DraftPolicy(Protocol):
    """Drafter for the live requests of one engine."""

    @property
    def waits(self) -> bool:
        """Whether the next steps wait for the tokens before them, so that they can have drafts."""
        ...

    def start(self, request: str, key: bytes, previous: np.ndarray | None = None) -> None:
        """Start or restart a request; ``previous``, int32[n], are the tokens of the response that it regenerates."""

    def add_history(self, key: bytes, history: PromptHistory | None) -> bool:
        """Take in the history of a pending prompt; return whether a request uses it, else the source may free it."""
        ...

    def step(self, done: DecodeStep) -> list[list[int]]:
        """Take in a decode step; return B drafts for the next one, each within its limit, all within the budget."""
        ...

    def proposes(self, rows: int) -> bool:
        """Return whether the model's own drafter is to draft after a step of so many rows; asked once a step."""
        ...

    def finish(self, request: str) -> RequestCounts:
        """End a request and return its draft counts; zeros for an unknown request."""
        ...
