"""The trainer of a simulation: how long it is busy with parts of the next update batch, and with the rest of it.

In the order of ``trainer/driver.py`` and ``trainer/stages.py``: while it waits for a batch it takes all that is
finished of it, if that is enough for a part, and asks again when it is through; when the batch is whole it trains what
was in no part, and takes the optimizer's step.
"""

from __future__ import annotations

from verl_rhyme.planning.cost import TrainingCost
from verl_rhyme.simulation.scenario import Part, Streaming


class Trainer:
    """See the module.

    Args:
        cost: What its work takes.
        streaming: How parts are made; ``None``: there are none.

    Attributes:
        busy: With a part: it looks at nothing else.
    """

    def __init__(self, cost: TrainingCost, streaming: Streaming | None) -> None:
        self._cost, self._streaming = cost, streaming
        self._parts: list[Part] = []
        self.busy = False

    @property
    def wants(self) -> int | None:
        """Samples of a part that it would begin now; ``None``: it begins none."""
        return None if self._streaming is None or self.busy else self._streaming.samples

    def begin(self, samples: int, tokens: int, now: float) -> float:
        """Begin a part of so many samples, with so many tokens of prompts and responses; the seconds that it takes."""
        assert self._streaming is not None
        assert not self.busy
        self.busy = True
        seconds = self._cost.part_seconds(tokens, self._streaming.update)
        self._parts.append(Part(now, now + seconds, samples, tokens))
        return seconds

    def through(self) -> None:
        """The part is done."""
        self.busy = False

    def update(self, tokens: int) -> tuple[float, tuple[Part, ...], int]:
        """The batch is there, of so many tokens: seconds until its step is taken, its parts, and the tokens of the
        rest."""
        parts, self._parts = tuple(self._parts), []
        early = sum(part.tokens for part in parts)
        gradients = self._streaming is None or self._streaming.update
        return self._cost.seconds(tokens, early, gradients), parts, tokens - early
