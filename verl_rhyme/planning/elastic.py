"""When generation should have one unit more, or less: the elastic rule, a state machine without a clock.

Published (StreamRL, arXiv:2504.15930, section 4.2): as responses grow, generation falls behind training by
``delta = T_gen - T_train``; when that is no less than what one data-parallel unit more would save, one is added.
Generation is then still no faster than training, so that the rule alone never adds what it would want to take away
again.

Beside it here: the same rule backwards (one less, when generation stays ahead of training all the same); medians over
some steps, for steps differ by chance, and where two batches are under way they may come in pairs, one long and one
short; a rest after each change until steps of the new size are seen; and a bound from below: where the long tail is the
floor a unit saves next to nothing, and any delta is "at least" that.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple


class Advice(NamedTuple):
    """What to do after a step.

    Attributes:
        change: Units to add (1) or take away (-1); 0: leave it.
        delta: Seconds by which generation is behind training, over the steps that counted.
        saving: Those that one unit more would save a step, or one less would cost where training is behind.
        why: In words.
    """

    change: int
    delta: float
    saving: float
    why: str


@dataclass(frozen=True)
class Limits:
    """What the rule is held to.

    Attributes:
        least, most: Units of generation.
        window: Steps whose medians count; an even number, for steps that come in pairs.
        rest: Steps after a change that do not count.
        margin: Share of a step by which the rule has to be exceeded, and which a unit has to save.

    Raises:
        ValueError: Bounds that cannot be.
    """

    least: int = 1
    most: int = 1 << 20
    window: int = 4
    rest: int = 2
    margin: float = 0.02

    def __post_init__(self) -> None:
        if not (1 <= self.least <= self.most and self.window >= 1 and self.rest >= 0 and 0 <= self.margin < 1):
            raise ValueError(f"least must be at least 1 and at most most, window at least 1, margin a share: {self}")


class Elastic:
    """One for a run.

    Args:
        predict: Seconds of generation by units, with the lengths as they now are; not increasing. Only ratios of it
            count: what is measured sets the scale.
        units: At the start.
        limits: See :class:`Limits`.

    Raises:
        ValueError: ``units`` is out of the limits.
    """

    def __init__(self, predict: Callable[[int], float], units: int, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        if not self.limits.least <= units <= self.limits.most:
            raise ValueError(f"{units} units, of {self.limits.least} to {self.limits.most}")
        self._predict = predict
        self.units = units
        self._resting = 0
        self._seen: deque[tuple[float, float]] = deque(maxlen=self.limits.window)

    def changed(self, units: int) -> None:
        """Generation has so many units from now on, by this advice or by itself (one that died)."""
        if units != self.units:
            self.units, self._resting = units, self.limits.rest
            self._seen.clear()

    def observe(self, generated: float, trained: float) -> Advice:
        """A step ended, of so many seconds of generation and of training; ``change`` is advice until :meth:`changed`.

        Raises:
            ValueError: Seconds that cannot be.
        """
        if not (math.isfinite(generated) and math.isfinite(trained) and generated >= 0 and trained >= 0):
            raise ValueError(f"seconds of generation and training must be at least 0: {generated}, {trained}")
        if self._resting:
            self._resting -= 1
            return Advice(0, generated - trained, 0.0, "the last change is new")
        self._seen.append((generated, trained))
        generated, trained = (median(times) for times in zip(*self._seen, strict=True))
        change, saving, why = self._wants(generated, trained)
        if len(self._seen) < self.limits.window:
            change, why = 0, f"{len(self._seen)} of {self.limits.window} steps seen: {why}"
        return Advice(change, generated - trained, saving, why)

    def _wants(self, generated: float, trained: float) -> tuple[int, float, str]:
        limits, delta = self.limits, generated - trained
        slack = limits.margin * max(generated, trained)
        now = self._predict(self.units)
        if delta > 0:
            saving = generated * (1 - self._predict(self.units + 1) / now)
            if self.units >= limits.most:
                return 0, saving, "there is no unit more"
            if saving < slack:
                return 0, saving, "one unit more would save next to nothing: the longest responses are the floor"
            if delta >= saving + slack:
                return 1, saving, "generation would still be no faster than training with one unit more"
            return 0, saving, "one unit more would leave training behind"
        if self.units <= limits.least:
            return 0, 0.0, "there is no unit less"
        loss = generated * (self._predict(self.units - 1) / now - 1)
        if -delta >= loss + slack:
            return -1, loss, "generation would be no slower than training with one unit less"
        return 0, loss, "one unit less would leave generation behind"
