"""What a placement policy is told and what it answers."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Request(NamedTuple):
    """What is known of a request when it asks for a replica; all but the id may be missing.

    Attributes:
        id: Its conversation: later turns and resumptions come under the same id.
        key: The prompt it belongs to: samples, turns and epochs of a prompt share it.
        sample: Number of the sample in its group, -1 when unknown.
        attempt: 0 for the first, one more for each resumption and each further turn.
        group: Samples of the prompt that are sent about now, this one included; 0 when unknown. From the first attempt
            of one of them on, room is kept for the others until they come or no request of the prompt runs.
        prompt_tokens: Tokens it begins with.
        response_tokens: Tokens it will add, as predicted or known; ``None`` when neither.
        last: Where the conversation was last; empty when it is new.
    """

    id: str
    key: str = ""
    sample: int = -1
    attempt: int = 0
    group: int = 0
    prompt_tokens: int = 0
    response_tokens: int | None = None
    last: str = ""

    @property
    def tokens(self) -> int:
        """KV tokens it will fill at its end; 0 when nobody knows."""
        return 0 if self.response_tokens is None else max(0, self.prompt_tokens + self.response_tokens)

    @property
    def new(self) -> bool:
        """Whether it begins a conversation."""
        return not self.attempt and not self.last


class PlacementPolicy(Protocol):
    """Answers where, over a :class:`~verl_rhyme.scheduling.placement.fleet.Fleet` that others keep up to date.

    May raise in any method: :class:`~verl_rhyme.scheduling.placement.placement.Placement` then takes the least loaded.
    """

    def choose(self, request: Request) -> str:
        """The replica for a request; changes nothing. The fleet has at least one."""
        ...

    def started(self, request: Request, replica: str) -> None:
        """It was sent there, on this policy's word or not; the fleet counts it already."""
        ...

    def released(self, request: Request, replica: str) -> None:
        """It ended, or its replica is about to leave; the fleet no longer counts it."""
        ...

    def removed(self, replica: str) -> None:
        """The replica is about to leave; all its requests were released."""
        ...

    def forget(self) -> None:
        """What runs stays where it is; what comes is placed by load, not by where its siblings are."""
        ...
