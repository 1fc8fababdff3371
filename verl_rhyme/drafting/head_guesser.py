"""A draft head over one batch, as the drafter asks it: position after position (:class:`.guesses.Guesser`).

On a GPU a position is a CUDA graph, one for each power of two of rows: a dozen small kernels take longer to launch than
to run. It reads the head's parameters in bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from verl_rhyme.drafting.guesses import Guesses
from verl_rhyme.drafting.head import DraftHead, Rows

#: Tokens that the head names at each position.
WAYS = 4


class HeadGuesser:
    """See the module.

    Args:
        head: It is read only; what training changes is seen after :meth:`refresh`.
        steps: Draft positions.
    """

    def __init__(self, head: DraftHead, steps: int):
        self._head, self._steps = head, steps
        self._gpu = head.scale.is_cuda
        self._read = copy.deepcopy(head).to(torch.bfloat16).requires_grad_(False) if self._gpu else head
        self._rows: Rows | None = None
        self._temperature, self._divisor = 1.0, torch.ones((), device=head.scale.device)
        self._states: Tensor | None = None  # on a GPU with one row more, for what fills up a graph's rows
        self._known = False
        self._graphs: dict[int, _Graph] = {}
        self._aside = torch.cuda.Stream(head.scale.device) if self._gpu else None  # for what is captured
        self.captured = 0  # graphs, ever

    @property
    def rows(self) -> Rows | None:
        """The policy's; ``None`` before they are known."""
        return self._rows

    @rows.setter
    def rows(self, rows: Rows | None) -> None:
        self._rows = rows
        self._graphs.clear()  # they read the old ones

    @property
    def temperature(self) -> float:
        """Of the policy's samples."""
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        if temperature != self._temperature:
            self._temperature = temperature
            self._divisor.fill_(temperature)

    @property
    def steps(self) -> int:
        """Draft positions that it guesses now: none without rows or hidden states."""
        return self._steps if self._rows is not None and self._known else 0

    @torch.no_grad()
    def refresh(self) -> None:
        """The head was trained."""
        if self._gpu:
            for ours, trained in zip(self._read.parameters(), self._head.parameters(), strict=True):
                ours.copy_(trained)

    def begin(self, hidden: Tensor | None) -> None:
        """The hidden state that gave each row's latest token: float[B, D]; ``None``: not known."""
        self._known = hidden is not None
        if hidden is None:
            return
        if not self._gpu:
            self._states = hidden.to(self._read.scale.dtype).clone()
            return
        if self._states is None or len(self._states) <= len(hidden):
            self._graphs.clear()  # they have the old ones
            self._states = torch.zeros(
                _power(len(hidden)) + 1, self._head.hidden, dtype=torch.bfloat16, device=hidden.device
            )
        self._states[: len(hidden)].copy_(hidden)

    def guess(self, position: int, going: np.ndarray, latest: np.ndarray) -> Guesses:
        """See :meth:`verl_rhyme.drafting.guesses.Guesser.guess`."""
        guessed = np.full((len(latest), WAYS), -1, dtype=np.int32)
        probability = np.zeros((len(latest), WAYS), dtype=np.float32)
        asked = np.stack([going, latest[going]]).astype(np.int64)
        with torch.inference_mode():
            if self._gpu:
                found = self._graph(len(going)).run(asked)
            else:
                found = self._name(torch.from_numpy(asked).to(self._divisor.device)).cpu().numpy()
        ways = found.shape[1] // 2
        guessed[going, :ways], probability[going, :ways] = found[:, :ways], found[:, ways:].view(np.float32)
        return guessed, probability

    def _name(self, asked: Tensor) -> Tensor:
        """int64[2, k], rows and the token before -> int32[k, 2 x ways], tokens and the bits of their probabilities."""
        rows, states, head = self._rows, self._states, self._read
        assert rows is not None, "asked without steps"
        assert states is not None, "asked without steps"
        going, tokens = asked
        state = head.step(states[going], head.embed(rows.entry[tokens], rows))
        states[going] = state.to(states.dtype)
        logits = head.logits(state, rows).float() / self._divisor
        best = logits.topk(min(WAYS, len(rows.tokens)))
        values = (best.values - logits.logsumexp(-1, keepdim=True)).exp()
        found = values.isfinite()
        named = torch.where(found, rows.tokens[best.indices], -1).to(torch.int32)
        return torch.cat([named, torch.where(found, values, 0).view(torch.int32)], dim=1)

    def _graph(self, rows: int) -> _Graph:
        size = _power(rows)
        if size not in self._graphs:
            assert self._states is not None, "asked without steps"
            pool = next((graph.pool() for graph in self._graphs.values()), None)
            self._graphs[size] = _Graph(self._name, size, self._states, self._aside, pool)
            self.captured += 1
        return self._graphs[size]


class _Graph:
    """A function of int64[2, k], for at most ``size`` columns, with its tensors.

    Args:
        call: int64[2, size] -> int32[size, n].
        size: Columns; those that are not used have the last of ``states`` for a row.
        states: See above; on the GPU.
        aside: A stream, the same for all: cuBLAS keeps 32 MiB for each stream that it was called on.
        pool: Memory of other graphs, of which one runs at a time.
    """

    def __init__(
        self, call: Callable[[Tensor], Tensor], size: int, states: Tensor, aside: torch.cuda.Stream | None, pool: object
    ):
        self._spare = len(states) - 1
        self._given = torch.zeros(2, size, dtype=torch.int64, pin_memory=True)
        self._given[0] = self._spare
        self._asked = self._given.to(states.device)
        current = torch.cuda.current_stream(states.device)
        # Outside a graph first, as torch wants it: libraries set themselves up.
        aside = aside or torch.cuda.Stream(states.device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            call(self._asked)
        current.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
            self._found = call(self._asked)
        self._told = torch.empty(self._found.shape, dtype=self._found.dtype, pin_memory=True)

    def pool(self) -> object:
        """Its memory."""
        return self._graph.pool()

    def run(self, asked: np.ndarray) -> np.ndarray:
        """int64[2, k] -> int32[k, n]; valid until the next call."""
        given, k = self._given.numpy(), asked.shape[1]
        given[:, :k], given[0, k:] = asked, self._spare
        self._asked.copy_(self._given, non_blocking=True)
        self._graph.replay()
        self._told.copy_(self._found, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._told.numpy()[:k]


def _power(rows: int) -> int:
    return 1 << max(0, rows - 1).bit_length()
