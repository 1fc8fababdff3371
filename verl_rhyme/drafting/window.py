"""The paper's draft window."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class WindowPolicy:
    """Draft window of one request: grows with fully accepted drafts, resets at any rejection (RhymeRL, HistoSpec).

    Attributes:
        start: Draft tokens at first and after a rejection.
        growth: Tokens added after a fully accepted draft.
        cap: Largest window in tokens.
        size: Present window in tokens.
    """

    start: int = 2
    growth: int = 2
    cap: int = 32
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = min(self.start, self.cap)

    def observe(self, drafted: int, accepted: int) -> None:
        """Take in the verification of one draft; a step without a draft changes nothing."""
        if drafted <= 0:
            return
        self.size = min(self.size + self.growth if accepted >= drafted else self.start, self.cap)
