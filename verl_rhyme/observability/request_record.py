"""Record of a request, made by the rollout server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl_rhyme.drafting.policy import SOURCES


@dataclass(kw_only=True)
class RequestRecord:
    """The server creates it, the client keeps it with its sample, and the trainer logs it: all fields except ``id`` are
    columns of the event log (``events.REQUESTS``), which derives its schema from this class.

    Times are in seconds since the Unix epoch, NaN if the event never happened. The drafter's counts, ``drafted_tokens``
    to ``waiting_steps``, arrive after the response, by id (``HistoryProposer.take_counts``).
    """

    id: str
    prompt_key: str  # hex
    sample: int
    request: int  # its number in its conversation
    replica: int
    node: str
    queued_at: float
    started_at: float
    first_token_at: float
    finished_at: float
    prompt_tokens: int
    #: Tokens of the prompt that the engine found in its prefix cache.
    cached_tokens: int = 0
    response_tokens: int
    policy_version_start: int
    policy_version_end: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verify_steps: int = 0
    history_hit: bool = False
    #: Accepted tokens that an interrupted response had already generated.
    reverified_tokens: int = 0
    #: [sources, 2]: drafted and accepted tokens by source (``drafting.policy.SOURCES``).
    by_source: list[list[int]] = field(default_factory=lambda: [[0, 0] for _ in SOURCES])
    #: Errors of the engine's drafter since its last report; those of all requests are reported with one of them.
    draft_errors: int = 0
    #: Time that the engine waited for drafts; it and the next two are reported like ``draft_errors``.
    draft_seconds: float = 0.0
    #: Steps of the engine.
    engine_steps: int = 0
    #: Those of them that waited for the tokens of the step before.
    waiting_steps: int = 0
    #: Predicted response tokens of this request when it was sent; ``None`` without a prediction.
    predicted_tokens: int | None = None
    #: Short reason why the coordinator placed the request at its replica; empty if the router decided.
    reason: str = ""
    stop_reason: str

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))
