"""The elastic rule: when generation should have one unit more or less. A state machine without a clock.

As published (StreamRL, arXiv:2504.15930, section 4.2): as responses grow, generation falls behind training by
``delta = T_gen - T_train``. When delta is at least what one more data-parallel unit would save, one is added.
Generation is then still no faster than training, so the rule never undoes its own change.

Additions here: the same rule in reverse (one unit less when generation stays ahead of training). Medians over some
steps, since steps vary; with two batches in flight, long and short ones may alternate. A rest after each change until
steps of the new size are observed. A minimum saving: where the longest responses bound the step, a unit saves almost
nothing, and any delta would exceed that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple


class Advice(NamedTuple):
    """Advice after a step.

    Attributes:
        change: Units to add (1) or remove (-1); 0: no change.
        delta: Seconds by which generation is behind training, over the counted steps.
        saving: Seconds a step that one more unit would save, or, where training is behind, that one less would cost.
        reason: Reason, in words.
    """

    change: int
    delta: float
    saving: float
    reason: str


@dataclass(frozen=True)
class Limits:
    """Limits of the rule.

    Attributes:
        least, most: Minimum and maximum units of generation.
        window: Number of steps in the medians; even, for steps that come in pairs.
        cooldown: Steps after a change that do not count.
        margin: Share of a step by which the rule must be exceeded, and that a unit must save.
    """

    least: int = 1
    most: int = 1 << 20
    window: int = 4
    cooldown: int = 2
    margin: float = 0.02


class Elastic:
    """The elastic rule of one run.

    Args:
        predict: Seconds of generation by units, with the current lengths; not increasing. Only ratios count:
            measurements set the scale.
        units: Units at the start, within the limits.
        limits: See :class:`Limits`.
    """

    def __init__(self, predict: Callable[[int], float], units: int, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        self._predict = predict
        self.units = units
        self._resting = 0
        self._seen: deque[tuple[float, float]] = deque(maxlen=self.limits.window)

    def set_units(self, units: int) -> None:
        """Set the number of units, after this advice or another event (a unit that died)."""
        if units != self.units:
            self.units, self._resting = units, self.limits.cooldown
            self._seen.clear()

    def observe(self, generated: float, trained: float) -> Advice:
        """Return advice after a step's seconds of generation and training; it stays advice until :meth:`set_units`."""
        if self._resting:
            self._resting -= 1
            return Advice(0, generated - trained, 0.0, "the last change is recent")
        self._seen.append((generated, trained))
        generated, trained = (median(times) for times in zip(*self._seen, strict=True))
        change, saving, reason = self._wants(generated, trained)
        if len(self._seen) < self.limits.window:
            change, reason = 0, f"{len(self._seen)} of {self.limits.window} steps seen: {reason}"
        return Advice(change, generated - trained, saving, reason)

    def _wants(self, generated: float, trained: float) -> tuple[int, float, str]:
        limits, delta = self.limits, generated - trained
        slack = limits.margin * max(generated, trained)
        now = self._predict(self.units)
        if delta > 0:
            saving = generated * (1 - self._predict(self.units + 1) / now)
            if self.units >= limits.most:
                return 0, saving, "no more units are available"
            if saving < slack:
                return 0, saving, "one more unit would save almost nothing: the longest responses bound the step"
            if delta >= saving + slack:
                return 1, saving, "generation would still be no faster than training with one more unit"
            return 0, saving, "training would be slower than generation with one more unit"
        if self.units <= limits.least:
            return 0, 0.0, "generation has the minimum number of units"
        loss = generated * (self._predict(self.units - 1) / now - 1)
        if -delta >= loss + slack:
            return -1, loss, "generation would be no slower than training with one unit less"
        return 0, loss, "generation would be slower than training with one unit less"
