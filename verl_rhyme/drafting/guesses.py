"""Between the drafter and a draft head (:mod:`verl_rhyme.drafting.head`), without torch: sizes, which the preflight
reads, the protocol, and by what is measured whether the head is asked."""

from __future__ import annotations

from typing import Protocol

import numpy as np

#: Tokens that a head drafts, at most: those that a run says most.
MOST_TOKENS = 1 << 15
#: Bytes of the latest hidden states, of which it is trained.
HEAD_BUFFER = 1 << 28
#: Positions whose distributions over these tokens a step of its training holds on a GPU.
HEAD_POSITIONS = 1024
#: int32[B, G] tokens and float32[B, G] probabilities of a position; of no head, G is 0.
Guesses = tuple[np.ndarray, np.ndarray]
NO_GUESSES: Guesses = np.zeros((1, 0), dtype=np.int32), np.zeros((1, 0), dtype=np.float32)


class Guesser(Protocol):
    """A draft head over one batch: position after position."""

    @property
    def steps(self) -> int:
        """Draft positions that it guesses now; 0: none."""
        ...

    def guess(self, position: int, going: np.ndarray, latest: np.ndarray) -> Guesses:
        """What may come at a draft position.

        Args:
            position: 0 for the first draft token, then 1 more at each call.
            going: int64[k], the rows of the batch that are asked for.
            latest: int32[B], the token before that position, of each row.

        Returns:
            int32[B, G] and float32[B, G], tokens (-1: none) and their probabilities; of rows not asked for, anything.
        """
        ...


class HeadGate:
    """Whether asking the head is profitable: tokens a second of steps whose drafts had it, and of those that had not.

    Both ways are measured anew for a few steps of every :data:`EVERY`, by how many rows a batch has (powers of two):
    what a head costs a step of few rows it may save, and not one of many.
    """

    #: Steps between two trials of the other way; steps of a trial; steps after which an observation counts 1/e.
    EVERY, TRIAL, MEMORY = 128, 8, 512
    #: Rows, over all steps, of either way before one is preferred: what a row emits in a step varies much.
    ENOUGH = 256

    def __init__(self) -> None:
        self._sums: dict[int, np.ndarray] = {}  # by class of rows: [without, with] x [tokens, seconds, steps]
        self._steps: dict[int, int] = {}

    def observe(self, rows: int, headed: bool, tokens: int, seconds: float) -> None:
        """Take in a plain decode step.

        Args:
            rows: Requests that decoded in it.
            headed: The head was asked for its drafts.
            tokens: Tokens that it emitted.
            seconds: What it took, planning included.
        """
        sums = self._sums.setdefault(rows.bit_length(), np.zeros((2, 3)))
        sums[int(headed)] = (1 - 1 / self.MEMORY) * sums[int(headed)] + (tokens, seconds, 1.0)

    def asks(self, rows: int) -> bool:
        """Whether the next plan of so many rows asks the head."""
        width = rows.bit_length()
        step = self._steps[width] = self._steps.get(width, -1) + 1
        sums = self._sums.get(width)
        if sums is None or sums[:, 2].min() < max(self.TRIAL, self.ENOUGH // rows):
            return step // self.TRIAL % 2 == 1
        rates = sums[:, 0] / sums[:, 1]
        better = bool(rates[1] > rates[0])
        return better != (step % self.EVERY < self.TRIAL)
