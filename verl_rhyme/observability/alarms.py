"""Silence is no proof of health: what a step's metrics say when drafting runs but does no work."""

from __future__ import annotations

from collections.abc import Mapping

from verl_rhyme.observability import metrics as names

#: Drafted tokens without a single accepted one that ring the alarm.
WINDOW = 4096


class AcceptanceAlarm:
    """Rings when the last :data:`WINDOW` drafted tokens were all rejected; a single accepted token ends it.

    At temperature 1 even a bad drafter is right now and then: no acceptance at all means that drafts are dropped on
    their way, or that the history is of other texts.
    """

    def __init__(self) -> None:
        self._rejected = 0.0

    @property
    def ringing(self) -> bool:
        return self._rejected >= WINDOW

    def observe(self, step: Mapping[str, float]) -> str | None:
        """Take in a step's metrics.

        Returns:
            What to tell the user, at the step with which the alarm begins.
        """
        before = self.ringing
        self._rejected = 0.0 if step.get(names.SPEC_ACCEPTED) else self._rejected + step.get(names.SPEC_DRAFTED, 0.0)
        if not self.ringing or before:
            return None
        return (
            f"the last {self._rejected:.0f} draft tokens were all rejected: drafting costs time and gives none. Run "
            "verl-rhyme doctor (a refused patch, an engine that changed?), and look at the history with verl-rhyme "
            "history (another data set's?); drafting.enable=false goes on without"
        )
