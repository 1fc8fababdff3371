"""What a draft policy is: the one interface between the engine's adapter and the drafters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from verl_rhyme.history.record import PromptHistory

#: Sources of draft tokens: earlier responses of the prompt, other samples of its group, the request's own text, other
#: prompts' texts, the draft head. A token that several sources propose counts for the first of them.
SOURCES = ("history", "siblings", "own", "others", "head")


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What drafting did for one request.

    Attributes:
        drafted, accepted: Tokens.
        verify_steps: Steps that verified a draft; tokens per verify step are ``1 + accepted / verify_steps``.
        history_hit: Its prompt had a history.
        reverified: Accepted tokens that were drafted from the request's previous text.
        drafted_history, ..., accepted_head: ``drafted`` and ``accepted`` by source (:data:`SOURCES`), without tokens
            from the request's previous text.
    """

    drafted: int = 0
    accepted: int = 0
    verify_steps: int = 0
    history_hit: bool = False
    reverified: int = 0
    drafted_history: int = 0
    drafted_siblings: int = 0
    drafted_own: int = 0
    drafted_others: int = 0
    drafted_head: int = 0
    accepted_history: int = 0
    accepted_siblings: int = 0
    accepted_own: int = 0
    accepted_others: int = 0
    accepted_head: int = 0


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A decode step that is over, and what the drafts of the next one may be.

    Attributes:
        requests: B started requests.
        rows: int[B], their rows of ``tokens``.
        tokens: int32[rows, positions], prompt and response of each, C-contiguous.
        lengths: int[B], tokens of each so far.
        drafted, accepted: int[B], what the step verified; both 0 where nothing had been drafted.
        limits: int[B], draft tokens each may have (:func:`verl_rhyme.drafting.bounds.request_limits`).
        budget: Draft tokens for the whole batch.
        seconds: What the step took, where it was a plain decode step of these requests and no others.
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


class DraftPolicy(Protocol):
    """Drafts for the live requests of one engine."""

    def start(self, request: str, key: bytes, previous: np.ndarray | None = None) -> None:
        """Begin a request of the prompt ``key``; starting it again begins it anew.

        Args:
            request: Its name.
            key: See :mod:`verl_rhyme.history.keys`.
            previous: int32[n], tokens of the response that it generates anew, where there is one.
        """

    def arrived(self, key: bytes, history: PromptHistory | None) -> bool:
        """The history of a prompt whose source had it pending.

        Returns:
            Whether a request draws on it from now on; the source may let it go where none does.
        """
        ...

    def step(self, done: DecodeStep) -> list[list[int]]:
        """Take in a decode step and draft for the next one.

        Returns:
            B drafts, each within its limit, together within the budget.
        """
        ...

    def finish(self, request: str) -> RequestCounts:
        """End a request and tell what drafting did for it; zeros for one that is not known."""
        ...
