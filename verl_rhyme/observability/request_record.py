"""One request, as the rollout server saw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True)
class RequestRecord:
    """Made by the server, kept by the client with its sample, logged by the trainer: its fields, but for the id, are
    columns of the event log (``events.REQUESTS``), which derives them from here.

    Times are seconds since the epoch, NaN when it never came to that. What the drafter did, ``drafted_tokens`` to
    ``head_seconds``, is told after the response, by id (``processes.request.DRAFT_COUNTS``).
    """

    id: str
    prompt_key: str  # hex
    sample: int
    attempt: int  # number of the request in its conversation
    replica: int
    node: str
    queued_at: float
    started_at: float
    first_token_at: float
    finished_at: float
    prompt_tokens: int
    response_tokens: int
    policy_version_start: int
    policy_version_end: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verify_steps: int = 0
    history_hit: bool = False
    #: Accepted ones that an interrupted response had said before.
    reverified_tokens: int = 0
    #: Draft tokens, and accepted ones, by source (``drafting.policy.SOURCES``).
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
    #: Of the engine's drafter since it was last asked; of all requests then, told with one of them.
    draft_errors: int = 0
    #: The same.
    draft_seconds: float = 0.0
    #: The same, of the training of its draft head: updates, the sum of their losses, seconds.
    head_updates: int = 0
    head_loss: float = 0.0
    head_seconds: float = 0.0
    #: Tokens that its response was predicted to add when it was sent; ``None`` without a prediction.
    predicted_tokens: int | None = None
    #: Why the coordinator wanted it at its replica, in a few words; empty where the router decided.
    reason: str = ""
    stop_reason: str

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))
