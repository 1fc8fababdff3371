"""Samples that cannot be started: now and then is no end of a run, again and again is."""

from __future__ import annotations

#: Seconds for which samples are lost at their start (one at least in so many), and none gets further, before it ends.
LOSING_S, LOSS_S = 180.0, 30.0


class LostStarts:
    """What became of starts, one after another."""

    def __init__(self) -> None:
        self._losing: tuple[float, float] | None = None  # since when one after another is lost; the latest

    def ended(self, lost: bool, now: float) -> bool:
        """One ended; whether the run cannot go on.

        Args:
            lost: At its start.
            now: Seconds, by any clock.
        """
        if not lost:
            self._losing = None
            return False
        since, latest = self._losing or (now, now)
        since = now if now - latest > LOSS_S else since  # one that starts tells nothing
        self._losing = since, now
        return now - since > LOSING_S
