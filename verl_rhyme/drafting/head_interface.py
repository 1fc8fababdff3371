"""Interface between the drafter and a draft head (:mod:`verl_rhyme.drafting.head`), without torch.

It has the head's sizes (also read by the preflight), the protocol, and the gate that decides when to use the head.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

#: Size of a head's vocabulary: the most frequent tokens of a run.
MOST_TOKENS = 1 << 15
#: Bytes of the buffer of the latest hidden states, the training data.
HEAD_BUFFER = 1 << 28
#: Positions whose distributions a training step holds on a GPU.
HEAD_POSITIONS = 1024
#: int32[B, G] tokens of a position (-1: none) and float32[B, G], their probabilities; G is 0 without a head.
Proposals = tuple[np.ndarray, np.ndarray]


class Head(Protocol):
    """A draft head that proposes tokens for one batch, position by position."""

    @property
    def steps(self) -> int:
        """Draft positions that the head proposes tokens for at present; 0: none."""
        ...

    def propose(self, position: int, active: np.ndarray, latest: np.ndarray) -> Proposals:
        """Propose the tokens of a draft position.

        Args:
            position: 0 for the first draft token, then 1 more at each call.
            active: int64[k], rows of the batch to propose tokens for; the result is arbitrary for the others.
            latest: int32[B], the token before that position in each row.
        """
        ...


class HeadGate:
    """Decides whether to use the head, by the tokens per second of steps with and without it.

    A few of every :data:`EVERY` steps try the other choice. Batch widths (powers of two) are measured separately,
    because a head may be profitable for few rows but not for many.
    """

    #: Steps between two trials of the other choice; steps of a trial; steps after which an observation's weight is 1/e.
    EVERY, TRIAL, MEMORY = 128, 8, 512
    #: Rows, summed over steps, that each choice needs before one is preferred: the tokens of a row vary much.
    ENOUGH = 256

    def __init__(self) -> None:
        self._sums: dict[int, np.ndarray] = {}  # by class of rows: [without, with] x [tokens, seconds, steps]
        self._steps: dict[int, int] = {}

    def observe(self, rows: int, headed: bool, tokens: int, seconds: float) -> None:
        """Observe a plain decode step of ``rows`` requests, ``headed`` if its drafts used the head.

        Args:
            tokens: Tokens that the step emitted.
            seconds: Duration of the step, including planning.
        """
        sums = self._sums.setdefault(rows.bit_length(), np.zeros((2, 3)))
        sums[int(headed)] = (1 - 1 / self.MEMORY) * sums[int(headed)] + (tokens, seconds, 1.0)

    def use_head(self, rows: int) -> bool:
        """Return whether the next plan of ``rows`` rows uses the head."""
        width = rows.bit_length()
        step = self._steps[width] = self._steps.get(width, -1) + 1
        sums = self._sums.get(width)
        if sums is None or sums[:, 2].min() < max(self.TRIAL, self.ENOUGH // rows):
            return step // self.TRIAL % 2 == 1
        rates = sums[:, 0] / sums[:, 1]
        better = bool(rates[1] > rates[0])
        return better != (step % self.EVERY < self.TRIAL)
