"""What travels with a request, and what comes back.

Towards the server it is one keyword of ``generate``, a plain dict: :class:`RequestMeta` by its fields' names. The
client makes it, a router of ours is told its assignment, our server takes it off. The engine gets the rest that
it needs (:data:`ENGINE`) in ``SamplingParams.extra_args``, which vLLM passes through: bytes, numbers and short strings
only, since vLLM copies every object in there.

Back comes a list with the :class:`RequestRecord` of each request, as dicts, in ``TokenOutput.extra_fields``, which verl
stores with the trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_rhyme.drafting.policy import SOURCES
from verl_rhyme.observability.request_record import RequestRecord
from verl_rhyme.placement.assignment import ANYWHERE, Assignment

__all__ = ["DIED", "DRAFT_COUNTS", "ENGINE", "FIELD", "RequestMeta", "RequestRecord"]

#: The keyword of ``generate``, and the key in ``extra_args`` and in ``extra_fields``.
FIELD = "rhyme"
#: Among an output's extra fields: its engine died, and the request is to go on elsewhere with these tokens.
DIED = "rhyme_died"
#: What proposer, sampler and the engine's front end go by.
ENGINE = ("id", "key", "asked", "noise", "previous", "made")

#: The drafter's counts of a request (``HistoryProposer.take_counts``), and their columns in its record.
DRAFT_COUNTS = {
    "drafted": "drafted_tokens",
    "accepted": "accepted_tokens",
    "verify_steps": "verify_steps",
    "history_hit": "history_hit",
    "reverified": "reverified_tokens",
    **{f"{kind}_{source}": f"{kind}_{source}" for kind in ("drafted", "accepted") for source in SOURCES},
    "draft_errors": "draft_errors",
    "draft_seconds": "draft_seconds",
    "head_updates": "head_updates",
    "head_loss": "head_loss",
    "head_seconds": "head_seconds",
}


@dataclass
class RequestMeta:
    """Towards the engine.

    Attributes:
        key: Prompt key in hex (see ``history.keys``); empty when no client of ours sent the request.
        sample: Number of the sample in its group, -1 when unknown.
        attempt: Number of the request in its conversation: 0 for the first, one more for each resumption and each turn
            (the event log's column is called so).
        before: Response tokens of the sample before it: of earlier turns, and of this one.
        assignment: Where and how it is to run.
        name: Of the sample's attempt; empty for one that no coordinator started.
        queued_at: When the client sent it, seconds since the epoch; 0 when unknown.
        noise: Key in hex of the noise its tokens are drawn with (:mod:`verl_rhyme.sampling.noise`); empty for one of
            the request's own.
        previous: int32 little-endian, tokens of the response that an interruption cut short and that this request
            generates anew.
        made: Tokens at the prompt's end that are this response's own: it goes on from them.
        id: The server's name of the request, set there.
        asked: When the server asked for a copy of the prompt's history, in ns since the epoch, set there; 0: the
            history is on its node.
    """

    key: str = ""
    sample: int = -1
    attempt: int = 0
    before: int = 0
    assignment: Assignment = ANYWHERE
    name: str = ""
    queued_at: float = 0.0
    noise: str = ""
    previous: bytes = b""
    made: int = 0
    id: str = ""
    asked: int = 0

    @classmethod
    def of(cls, extra_args: dict[str, Any] | None) -> RequestMeta:
        """What :meth:`put` gave the engine, from ``SamplingParams.extra_args``."""
        return cls(**((extra_args or {}).get(FIELD) or {}))

    def put(self, sampling_params: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``sampling_params`` that carries what the engine is told."""
        told = {name: getattr(self, name) for name in ENGINE}
        return {**sampling_params, "extra_args": {**(sampling_params.get("extra_args") or {}), FIELD: told}}

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))
