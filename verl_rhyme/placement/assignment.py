"""The replica, the queue place and the forecast of an attempt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assignment of an attempt: it travels unchanged from the coordinator to session, router, server and event log."""

    replica: str = ""  # its address; empty: the router decides
    reason: str = ""  # for the replica, in a few words
    oldest_version: int = 0  # that may generate; a replica with an older one takes a newer one first
    priority: int = 0  # place in the engine's queue, lowest first; validation has 0
    expected_tokens: int | None = None  # of the response over all turns; None without a forecast
    p90_tokens: int | None = None  # 90th percentile of these; None without a forecast

    def remaining(self, tokens: int) -> tuple[int | None, int | None]:
        """Return the expected tokens and their 90th percentile, less the first ``tokens``."""
        forecasts = self.expected_tokens, self.p90_tokens
        expected, p90 = (None if each is None else max(0, each - tokens) for each in forecasts)
        return expected, p90


ANYWHERE = Assignment()
