"""Metadata of a request, and the records that come back with its output.

The client passes :class:`RequestMeta` to the server as one keyword of ``generate``, a plain dict of its fields. The
rhyme router reads the assignment, and the rhyme server removes the keyword. The engine gets the fields in
:data:`ENGINE` in ``SamplingParams.extra_args``, which vLLM passes through: bytes, numbers and short strings only,
because vLLM copies every object there. ``TokenOutput.extra_fields`` carries a list with the :class:`RequestRecord` of
each request, as dicts, which verl stores with the trajectory.
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
    """Metadata that the client sends with a request."""

    key: str = ""  # prompt key in hex (history.keys); empty if another client sent the request
    sample: int = -1  # number in its group; -1 if unknown
    request: int = 0  # number in its conversation, from 0: each resumption and turn adds one; in the event log
    earlier_tokens: int = 0  # response tokens of the sample before this request, in other turns and in this one
    assignment: Assignment = ANYWHERE  # replica, priority and expected length
    name: str = ""  # of the sample's attempt; empty if no coordinator started it
    queued_at: float = 0.0  # when the client sent it, seconds since the epoch; 0 if unknown
    noise: str = ""  # key in hex of the noise that draws its tokens (sampling.noise); empty: of this request alone
    earlier_text: bytes = b""  # tokens of the interrupted response that it regenerates, int32 little-endian
    resumed_tokens: int = 0  # response tokens at the prompt's end; the request continues after them
    id: str = ""  # set by the server
    history_requested_ns: int = 0  # when the server requested the prompt's history, ns since the epoch; 0: on its node

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
