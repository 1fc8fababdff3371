"""Where and how an attempt at a sample is to run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assignment:
    """Made by the coordinator, and carried unchanged in the start, the agent loop's session, each request to router and
    server, and the event log. An attempt that no coordinator started has the defaults.

    Attributes:
        replica: Address of the replica; empty: the router decides.
        reason: Why there, in a few words.
        oldest_version: Oldest policy version that may generate: a replica that serves an older one takes a newer one
            first.
        priority: Place in the engine's queue, lowest first; validation has 0.
        expected_tokens: Response tokens that are expected, in all turns; ``None`` without a prediction.
        p90_tokens: 90th percentile of the response tokens; ``None`` without a prediction.
    """

    replica: str = ""
    reason: str = ""
    oldest_version: int = 0
    priority: int = 0
    expected_tokens: int | None = None
    p90_tokens: int | None = None

    def left(self, had: int) -> tuple[int | None, int | None]:
        """Expected tokens and their 90th percentile, less the first ``had``."""
        expected, p90 = self.expected_tokens, self.p90_tokens
        return None if expected is None else max(0, expected - had), None if p90 is None else max(0, p90 - had)


ANYWHERE = Assignment()
