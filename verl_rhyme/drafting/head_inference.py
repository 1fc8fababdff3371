"""Inference of a draft head for one batch, position by position (:class:`.head_interface.Head`).

On a GPU a position is a CUDA graph, one for each power of two of rows, because a dozen small kernels take longer to
launch than to run. The head's parameters are read in bfloat16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from verl_rhyme.drafting.head import DraftHead, PolicyRows
from verl_rhyme.drafting.head_interface import Proposals

#: Tokens that the head names at each position.
WAYS = 4


class HeadInference:
    """A draft head in use; a :class:`verl_rhyme.drafting.head_interface.Head`.

    Args:
        head: Head to read; training takes effect after :meth:`refresh`.
        steps: Draft positions.
    """

    def __init__(self, head: DraftHead, steps: int):
        self._head, self._steps = head, steps
        self._gpu = head.scale.is_cuda
        self._read = copy.deepcopy(head).to(torch.bfloat16).requires_grad_(False) if self._gpu else head
        self._rows: PolicyRows | None = None
        self._temperature, self._divisor = 1.0, torch.ones((), device=head.scale.device)
        self._states: Tensor | None = None  # on a GPU with a spare row, for a graph's padding
        self._known = False
        self._graphs: dict[int, _Graph] = {}
        self._aside = torch.cuda.Stream(head.scale.device) if self._gpu else None  # stream for captures
        self.captured = 0  # graphs captured so far

    @property
    def rows(self) -> PolicyRows | None:
        """The policy's rows; ``None`` before they were copied."""
        return self._rows

    @rows.setter
    def rows(self, rows: PolicyRows | None) -> None:
        self._rows = rows
        self._graphs.clear()  # graphs hold addresses of the old rows

    @property
    def temperature(self) -> float:
        """Sampling temperature of the policy."""
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        if temperature != self._temperature:
            self._temperature = temperature
            self._divisor.fill_(temperature)

    @property
    def steps(self) -> int:
        """Draft positions that the head proposes tokens for; 0 without rows or hidden states."""
        return self._steps if self._rows is not None and self._known else 0

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the trained parameters."""
        if self._gpu:
            for ours, trained in zip(self._read.parameters(), self._head.parameters(), strict=True):
                ours.copy_(trained)

    def begin(self, hidden: Tensor | None) -> None:
        """Set the hidden state that gave each row's latest token, float[B, D]; ``None``: unknown."""
        self._known = hidden is not None
        if hidden is None:
            return
        if not self._gpu:
            self._states = hidden.to(self._read.scale.dtype).clone()
            return
        if self._states is None or len(self._states) <= len(hidden):
            self._graphs.clear()  # graphs hold addresses of the old states
            self._states = torch.zeros(
                _power(len(hidden)) + 1, self._head.hidden, dtype=torch.bfloat16, device=hidden.device
            )
        self._states[: len(hidden)].copy_(hidden)

    def propose(self, position: int, active: np.ndarray, latest: np.ndarray) -> Proposals:
        """See :meth:`verl_rhyme.drafting.head_interface.Head.propose`."""
        proposed = np.full((len(latest), WAYS), -1, dtype=np.int32)
        probability = np.zeros((len(latest), WAYS), dtype=np.float32)
        inputs = np.stack([active, latest[active]]).astype(np.int64)
        with torch.inference_mode():
            if self._gpu:
                outputs = self._graph(len(active)).run(inputs)
            else:
                outputs = self._name(torch.from_numpy(inputs).to(self._divisor.device)).cpu().numpy()
        ways = outputs.shape[1] // 2
        proposed[active, :ways], probability[active, :ways] = outputs[:, :ways], outputs[:, ways:].view(np.float32)
        return proposed, probability

    def _name(self, inputs: Tensor) -> Tensor:
        """Propose by rows and the tokens before: int64[2, k] -> int32[k, 2 x ways], tokens and probability bits."""
        rows, states, head = self._rows, self._states, self._read
        assert rows is not None, "propose() called while steps is 0"
        assert states is not None, "propose() called while steps is 0"
        active, tokens = inputs
        state = head.step(states[active], head.embed(rows.entry[tokens], rows))
        states[active] = state.to(states.dtype)
        logits = head.logits(state, rows).float() / self._divisor
        best = logits.topk(min(WAYS, len(rows.tokens)))
        values = (best.values - logits.logsumexp(-1, keepdim=True)).exp()
        finite = values.isfinite()
        named = torch.where(finite, rows.tokens[best.indices], -1).to(torch.int32)
        return torch.cat([named, torch.where(finite, values, 0).view(torch.int32)], dim=1)

    def _graph(self, rows: int) -> _Graph:
        size = _power(rows)
        if size not in self._graphs:
            assert self._states is not None, "propose() called while steps is 0"
            pool = next((graph.pool() for graph in self._graphs.values()), None)
            self._graphs[size] = _Graph(self._name, size, self._states, self._aside, pool)
            self.captured += 1
        return self._graphs[size]


class _Graph:
    """A captured function of int64[2, k], for at most ``size`` columns, with its buffers.

    Args:
        call: Function to capture, int64[2, size] -> int32[size, n].
        size: Columns; unused ones refer to the last row of ``states``.
        states: Hidden states on the GPU.
        aside: Capture stream shared by all graphs, because cuBLAS keeps 32 MiB for each stream.
        pool: Memory pool shared with other graphs, of which one runs at a time.
    """

    def __init__(
        self, call: Callable[[Tensor], Tensor], size: int, states: Tensor, aside: torch.cuda.Stream | None, pool: object
    ):
        self._spare = len(states) - 1
        self._host_inputs = torch.zeros(2, size, dtype=torch.int64, pin_memory=True)
        self._host_inputs[0] = self._spare
        self._inputs = self._host_inputs.to(states.device)
        current = torch.cuda.current_stream(states.device)
        # torch requires a first call outside a graph, in which libraries initialise.
        aside = aside or torch.cuda.Stream(states.device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            call(self._inputs)
        current.wait_stream(aside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
            self._outputs = call(self._inputs)
        self._host_outputs = torch.empty(self._outputs.shape, dtype=self._outputs.dtype, pin_memory=True)

    def pool(self) -> object:
        """Return the graph's memory pool."""
        return self._graph.pool()

    def run(self, inputs: np.ndarray) -> np.ndarray:
        """Run the function, int64[2, k] -> int32[k, n]; the result is valid until the next call."""
        host_inputs, k = self._host_inputs.numpy(), inputs.shape[1]
        host_inputs[:, :k], host_inputs[0, k:] = inputs, self._spare
        self._inputs.copy_(self._host_inputs, non_blocking=True)
        self._graph.replay()
        self._host_outputs.copy_(self._outputs, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return self._host_outputs.numpy()[:k]


def _power(rows: int) -> int:
    return 1 << max(0, rows - 1).bit_length()
