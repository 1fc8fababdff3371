"""The simulated trainer: the time it takes for parts of the next update batch, and for the rest of the batch.

The order is that of ``trainer/driver.py`` and ``trainer/stages.py``. While the trainer waits for a batch, it trains the
batch's finished samples as soon as they are enough for a part. When the batch is complete, it trains the remaining
samples and takes the optimizer step.
"""

from __future__ import annotations

from verl_rhyme.planning.cost import TrainingCost
from verl_rhyme.simulation.scenario import Part, Streaming


class Trainer:
    """The simulated trainer; it trains parts if it has ``streaming`` options. ``busy``: it is training a part."""

    def __init__(self, cost: TrainingCost, streaming: Streaming | None) -> None:
        self._cost, self._streaming = cost, streaming
        self._parts: list[Part] = []
        self.busy = False

    @property
    def wants(self) -> int | None:
        """Minimum samples of a part to start now; ``None`` if no part may start."""
        return None if self._streaming is None or self.busy else self._streaming.samples

    def begin(self, samples: int, tokens: int, now: float) -> float:
        """Start a part and return its duration in seconds; ``tokens`` are those of prompts and responses."""
        assert self._streaming is not None
        assert not self.busy
        self.busy = True
        seconds = self._cost.part_seconds(tokens, self._streaming.update)
        self._parts.append(Part(now, now + seconds, samples, tokens))
        return seconds

    def through(self) -> None:
        self.busy = False

    def update(self, tokens: int) -> tuple[float, tuple[Part, ...], int]:
        """Train the rest of a batch of ``tokens`` tokens; return the seconds, the parts, and the tokens of the rest."""
        parts, self._parts = tuple(self._parts), []
        early = sum(part.tokens for part in parts)
        gradients = self._streaming is None or self._streaming.update
        return self._cost.seconds(tokens, early, gradients), parts, tokens - early
