"""Metadata of a request, and the records that come back with its output.

The client passes :class:`RequestMeta` to the server as one keyword of ``generate``, a plain dict of its fields. The
rhyme router reads the assignment, and the rhyme server removes the keyword. The engine gets the fields it needs
(:data:`ENGINE`) in ``SamplingParams.extra_args``, which vLLM passes through. They are bytes, numbers and short strings
only, because vLLM copies every object there.

The output carries a list with the :class:`RequestRecord` of each request, as dicts, in ``TokenOutput.extra_fields``.
verl stores it with the trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_rhyme.observability.request_record import RequestRecord
from verl_rhyme.placement.assignment import ANYWHERE, Assignment

__all__ = ["DIED", "ENGINE", "FIELD", "RequestMeta", "RequestRecord"]

#: Keyword of ``generate``, and key in ``extra_args`` and ``extra_fields``.
FIELD = "rhyme"
#: Extra field of an output whose engine died: another replica continues the request with these tokens.
DIED = "rhyme_died"
#: Fields for the proposer, the sampler and the engine's front end.
ENGINE = ("id", "key", "history_requested_ns", "noise", "earlier_text", "resumed_tokens")


@dataclass
class RequestMeta:
    """Metadata that the client sends with a request.

    Attributes:
        key: Prompt key in hex (see ``history.keys``); empty if another client sent the request.
        sample: Number of the sample in its group, -1 if unknown.
        attempt: Number of the request in its conversation, from 0; each resumption and each turn adds one. The event
            log has a column of this name.
        earlier_tokens: Response tokens of the sample before this request, in other turns and in this one.
        assignment: Replica, priority and expected length of the request.
        name: Name of the sample's attempt; empty if no coordinator started it.
        queued_at: Time the client sent it, seconds since the epoch; 0 if unknown.
        noise: Key, in hex, of the noise that draws its tokens (:mod:`verl_rhyme.sampling.noise`); empty: noise of this
            request alone.
        earlier_text: Tokens of the interrupted response that this request regenerates, int32 little-endian.
        resumed_tokens: Number of response tokens at the prompt's end; the request continues after them.
        id: Request id, set by the server.
        history_requested_ns: Time the server requested a copy of the prompt's history, in ns since the epoch; 0: the
            history is on its node.
    """

    key: str = ""
    sample: int = -1
    attempt: int = 0
    earlier_tokens: int = 0
    assignment: Assignment = ANYWHERE
    name: str = ""
    queued_at: float = 0.0
    noise: str = ""
    earlier_text: bytes = b""
    resumed_tokens: int = 0
    id: str = ""
    history_requested_ns: int = 0

    @classmethod
    def of(cls, extra_args: dict[str, Any] | None) -> RequestMeta:
        """Return the metadata that :meth:`put` passed to the engine, from ``SamplingParams.extra_args``."""
        return cls(**((extra_args or {}).get(FIELD) or {}))

    def put(self, sampling_params: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``sampling_params`` with the engine's fields."""
        fields = {name: getattr(self, name) for name in ENGINE}
        return {**sampling_params, "extra_args": {**(sampling_params.get("extra_args") or {}), FIELD: fields}}

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))
