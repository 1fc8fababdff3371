"""Draft policies: the interface between the engine's proposer and the drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from verl_rhyme.history.record import PromptHistory

#: Sources of draft tokens: earlier responses of the prompt, other samples of its group, the request's own text, other
#: prompts' texts. A token that several sources propose counts for the first of them.
SOURCES = ("history", "siblings", "own", "others")


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What drafting did for one request; columns of its record of the same names.

    Tokens per verify step are ``1 + accepted_tokens / verify_steps``.
    """

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verify_steps: int = 0  # steps that verified a draft
    history_hit: bool = False  # its prompt had a history
    reverified_tokens: int = 0  # accepted tokens that were drafted from the request's previous text
    # [sources, 2]: drafted and accepted tokens by source (SOURCES), without those from the request's previous text.
    by_source: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in SOURCES])


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A finished decode step, with the bounds of the next drafts.

    Attributes:
        requests: B started requests.
        rows: int[B], rows of the requests in ``tokens``.
        tokens: int32[rows, positions], prompt and response of each, C-contiguous.
        lengths: int[B], tokens of each request so far.
        drafted, accepted: int[B], drafted and accepted tokens of the step; 0 without a draft.
        limits: int[B], most draft tokens of each request (:func:`verl_rhyme.drafting.bounds.request_limits`).
        budget: Most draft tokens of the batch.
        seconds: Duration of the step without its plan; ``None`` after a pause.
        planning: Seconds of the plan before it.
        prefilled: Prompt tokens that the step computed.
    """

    requests: Sequence[str]
    rows: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    drafted: Sequence[int] | np.ndarray
    accepted: Sequence[int] | np.ndarray
    limits: np.ndarray
    budget: int
    seconds: float | None = None
    planning: float = 0.0
    prefilled: int = 0


class DraftPolicy(Protocol):
    """Drafter for the live requests of one engine."""

    def start(self, request: str, key: bytes, previous: np.ndarray | None = None) -> None:
        """Start or restart a request.

        Args:
            request: Name of the request.
            key: Key of its prompt (:mod:`verl_rhyme.history.keys`).
            previous: int32[n], tokens of the response that the request regenerates, if any.
        """

    def add_history(self, key: bytes, history: PromptHistory | None) -> bool:
        """Take in the history of a prompt that was pending.

        Returns:
            Whether a request uses the history; otherwise the source may free it.
        """
        ...

    def step(self, done: DecodeStep) -> list[list[int]]:
        """Take in a decode step and draft for the next one.

        Returns:
            B drafts, each within its limit, together within the budget.
        """
        ...

    def finish(self, request: str) -> RequestCounts:
        """End a request and return its draft counts; zeros for an unknown request."""
        ...
