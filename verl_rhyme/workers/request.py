"""What travels with a request: set by agent loop and client, read by server and proposer, returned with the tokens.

Both ways it is a plain dict under the key ``"rhyme"``: towards the engine in ``SamplingParams.extra_args``, which verl
and vLLM pass through untouched, and back in ``TokenOutput.extra_fields``, which verl stores with the trajectory.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

#: The key in ``extra_args`` and in ``extra_fields``.
FIELD = "rhyme"

#: The drafter's counts of a request (``HistoryProposer.take_counts``), and their columns in its record.
COUNTS = {
    "drafted": "drafted_tokens",
    "accepted": "accepted_tokens",
    "verify_steps": "verify_steps",
    "history_hit": "history_hit",
    "reverified": "reverified_tokens",
    "draft_errors": "draft_errors",
    "draft_seconds": "draft_seconds",
}


@dataclass
class RequestMeta:
    """Towards the engine.

    Attributes:
        key: Prompt key in hex (see ``history.keys``); empty when no client of ours sent the request.
        sample: Number of the sample in its group, -1 when unknown.
        id: The server's name of the request.
        queued_at: When the client sent it, seconds since the epoch; 0 when unknown.
        attempt: 0 for the first, then one more for each resumption of an aborted request and each further turn.
        noise: Key in hex of the noise its tokens are drawn with (:mod:`verl_rhyme.sampling.noise`); empty for one of
            the request's own.
        previous: Tokens of the response that an interruption cut short and that this request generates anew.
    """

    key: str = ""
    sample: int = -1
    id: str = ""
    queued_at: float = 0.0
    attempt: int = 0
    noise: str = ""
    previous: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, sampling_params: dict[str, Any]) -> RequestMeta:
        return cls(**((sampling_params.get("extra_args") or {}).get(FIELD) or {}))

    def put(self, sampling_params: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``sampling_params`` that carries this, the list itself and no copy of it."""
        extra = {**(sampling_params.get("extra_args") or {}), FIELD: dict(vars(self))}
        return {**sampling_params, "extra_args": extra}


@dataclass
class RequestRecord:
    """One attempt, as the server saw it: columns of the event log (``observability.events.REQUESTS``), and its id.

    Times are seconds since the epoch, NaN when it never came to that. What the drafter did (:data:`COUNTS`) is told
    after the response, by id.
    """

    id: str
    prompt_key: str
    sample: int
    attempt: int
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
    stop_reason: str
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verify_steps: int = 0
    history_hit: bool = False
    reverified_tokens: int = 0
    draft_errors: int = 0
    draft_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
