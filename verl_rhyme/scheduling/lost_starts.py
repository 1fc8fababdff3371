"""Detection of repeated failures to start samples, which end a run; single failures do not."""

from __future__ import annotations

#: Seconds of lost starts after which the run ends, and maximum seconds between two of them.
LOSING_S, LOSS_S = 180.0, 30.0


class LostStarts:
    """Sequence of lost starts."""

    def __init__(self) -> None:
        self._losing: tuple[float, float] | None = None  # times of the first and the latest lost start in a row

    def ended(self, lost: bool, now: float) -> bool:
        """Record the end of an attempt at ``now`` seconds, by any clock; return whether the run cannot continue."""
        if not lost:
            self._losing = None
            return False
        since, latest = self._losing or (now, now)
        since = now if now - latest > LOSS_S else since  # a start in progress is no evidence
        self._losing = since, now
        return now - since > LOSING_S
