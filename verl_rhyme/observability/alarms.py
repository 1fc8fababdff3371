"""Alarms for runs whose drafts are never accepted, and for log-probabilities that are no numbers."""

from __future__ import annotations

from collections.abc import Mapping

from verl_rhyme.observability import metrics as names

#: Warning, logged once; its argument is a number of tokens.
BAD_LOGPROBS = (
    "the engine sampled %d tokens with a log-probability of NaN or infinity: their importance weights, and so the "
    "loss, become NaN. The engine's logits overflow (actor_rollout_ref.rollout.dtype=float16?) or its weights are "
    "damaged (did the loss diverge before?). Resume from a checkpoint before the first step with rollout/bad_logprobs "
    "above 0"
)
#: Consecutive rejected draft tokens that raise the alarm.
WINDOW = 4096


class AcceptanceAlarm:
    """Alarm that is active when the last :data:`WINDOW` draft tokens were all rejected; one accepted token ends it.

    At temperature 1 even a bad drafter is sometimes right. No acceptance at all means that drafts are lost before they
    are verified, or that the history holds other texts.
    """

    def __init__(self) -> None:
        self._rejected = 0.0

    @property
    def active(self) -> bool:
        return self._rejected >= WINDOW

    def observe(self, step: Mapping[str, float]) -> str | None:
        """Add the metrics of a step. Return a warning for the user if the alarm becomes active."""
        before = self.active
        self._rejected = 0.0 if step.get(names.SPEC_ACCEPTED) else self._rejected + step.get(names.SPEC_DRAFTED, 0.0)
        if not self.active or before:
            return None
        return (
            f"the last {self._rejected:.0f} draft tokens were all rejected: drafting costs time and saves none. Run "
            "verl-rhyme doctor (a refused patch or a changed engine?) and inspect the history with verl-rhyme history "
            "(does it belong to another data set?); drafting.enable=false trains without drafts"
        )
