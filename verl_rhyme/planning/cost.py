"""Seconds of a replica's work, by a few coefficients, for planner and simulator.

A decode step of R rows, with C tokens in their KV caches and D draft tokens to verify, takes::

    base + row R + cached C + draft D + drafting [D > 0]

The base is the time to read the weights; ``cached C`` is the time to read the caches. A step is memory-bound until rows
and drafts are many. A prefill of P tokens takes ``prefill P``, and no row advances meanwhile. Engines that mix prefill
with decoding (chunked prefill) lose the same time, spread out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepCost:
    """Coefficients of a decode step, in seconds: of a step (``base``), of each request, cached token and verified draft
    token in it, and of drafting itself.
    """

    base: float
    row: float = 0.0
    cached: float = 0.0
    draft: float = 0.0
    drafting: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"step.{field.name} must be seconds, at least 0, not {value!r}")
        if not self.base + self.row > 0:
            raise ValueError("step.base and step.row are both 0: set one above 0, since a step takes time")

    def seconds(self, rows: int, cached: float = 0.0, drafts: float = 0.0) -> float:
        return self.base + self.row * rows + self.cached * cached + self.draft * drafts + self.drafting * (drafts > 0)


@dataclass(frozen=True)
class ReplicaCost:
    """Cost and capacity of one kind of replica.

    Attributes:
        step: Cost of a decode step.
        prefill: Seconds of a prompt token.
        slots: Requests that it decodes at a time (``max_num_seqs``).
        room: Tokens that fit into its KV cache.
        gpus: GPUs of the replica.
    """

    step: StepCost
    prefill: float = 0.0
    slots: int = 256
    room: float = math.inf
    gpus: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.prefill) and self.prefill >= 0):
            raise ValueError(f"prefill must be seconds, at least 0, not {self.prefill!r}")
        for name in ("slots", "room", "gpus"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}")

    def slowed(self, factor: float) -> ReplicaCost:
        """Return this cost with all work ``factor`` times as slow."""
        if factor == 1:
            return self
        step = StepCost(*(factor * getattr(self.step, field.name) for field in fields(StepCost)))
        return replace(self, step=step, prefill=factor * self.prefill)

    def drafted(self, pace: float, overhead: float) -> ReplicaCost:
        """Return the cost with drafting, per decode step without drafting.

        Args:
            pace: Tokens per decode step, at least 1.
            overhead: Draft tokens verified for each gained token.
        """
        if not (1 <= pace < math.inf and 0 <= overhead < math.inf):
            raise ValueError(f"drafts.acceptance must be at least 1 and drafts.overhead 0, not {pace} and {overhead}")
        if pace == 1:
            return self
        step = self.step
        row = step.row + step.draft * (pace - 1) * overhead
        return replace(self, step=StepCost((step.base + step.drafting) / pace, row / pace, step.cached / pace))

    def together(
        self, longest: npt.ArrayLike, tokens: npt.ArrayLike, held: npt.ArrayLike, room: npt.ArrayLike | None = None
    ) -> Floats:
        """Return the seconds until the last of some responses that start together ends, in any order of ends.

        With steps of ``base + row R + cached C`` seconds that is ``base S + row tokens + cached held``. The number of
        steps S is at least that of the longest response, and enough to bring all tokens through the slots and through
        the cache.

        Args:
            longest: Tokens of the longest response.
            tokens: Tokens of all responses.
            held: Cached tokens, summed over the steps of all responses: ``n (p + n / 2)`` for n tokens after a prompt
                of p.
            room: Tokens that fit into the cache; ``None``: this kind's.

        Returns:
            float64, of the arguments' common shape.
        """
        room = self.room if room is None else room
        steps = np.maximum(np.maximum(longest, np.divide(tokens, self.slots)), np.divide(held, room))
        return self.step.base * steps + self.step.row * np.asarray(tokens) + self.step.cached * np.asarray(held)


#: Default without measurements: a 32B model in bf16 over four H800s, calculated (``planning/profiles``).
TYPICAL = ReplicaCost(StepCost(base=10e-3, row=33e-6, cached=26e-9), prefill=33e-6)


@dataclass
class TrainingCost:
    """Cost of the work between rollouts, on the training GPUs.

    Attributes:
        token: Seconds of a prompt or response token, log-probs and update together.
        logprobs: Share of that for log-probs (old and reference): two of eight operations a weight and token.
        update: Further seconds of a training step.
        part: Further seconds of each part but the last, where a batch's samples come in parts (StreamRL,
            arXiv:2504.15930, section 4.1).
        sync: Seconds from a training step's end until its weights are in the engines.
        copy: Seconds of these that block the trainer where replicas take versions one by one: until the weights
            are in the relay. ``None``: all; also where all replicas take a version together.
        reward: Seconds from a response's end to its reward.
        start: Seconds from the new weights until the first requests are in the engines' slots.
    """

    token: float = 0.0
    logprobs: float = 0.25
    update: float = 0.0
    part: float = 0.0
    sync: float = 0.0
    reward: float = 0.0
    start: float = 0.0
    copy: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"training.{field.name} must be seconds, at least 0, not {value!r}")
        if self.logprobs > 1:
            raise ValueError(f"training.logprobs must be a share, from 0 to 1, not {self.logprobs!r}")

    def seconds(self, tokens: float, early: float = 0.0, gradients: bool = True) -> float:
        """Return the seconds of a training step once all its samples are present.

        ``early`` of its tokens were processed in parts before; ``gradients``: as in :meth:`part_seconds`.
        """
        return self.update + self.token * (tokens - early * self._ahead(gradients))

    def blocked_s(self, one_by_one: bool) -> float:
        """Return the seconds for which publication blocks the trainer (``Rules.one_by_one``)."""
        return min(self.copy, self.sync) if one_by_one and self.copy is not None else self.sync

    def part_seconds(self, tokens: float, gradients: bool = True) -> float:
        """Return the seconds of a part, with gradients or only log-probs."""
        return self.part + self.token * tokens * self._ahead(gradients)

    def _ahead(self, gradients: bool) -> float:
        """Return the share of a token's seconds that need not wait for the whole batch."""
        return 1.0 if gradients else self.logprobs
