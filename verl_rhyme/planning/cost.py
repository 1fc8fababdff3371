"""What a replica's work costs in seconds, by a few coefficients: what planner and simulator reckon with.

A decode step of R rows, whose KV caches hold C tokens together and which verifies D draft tokens, takes::

    base + row R + cached C + draft D + drafting [D > 0]

The base is the reading of the weights, C the reading of the caches; a step is bound by memory until rows and drafts are
many. A prefill of P tokens takes ``prefill P`` and no row advances meanwhile: engines that mix prefill with decoding
(chunked prefill) lose as much time, only spread out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StepCost:
    """Coefficients of a decode step, seconds each; none below 0.

    Attributes:
        base: Of a step.
        row: Of each request in it.
        cached: Of each token in their KV caches.
        draft: Of each draft token that is verified.
        drafting: Of drafting at all.

    Raises:
        ValueError: One is negative or not finite, or a step takes no time.
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
                raise ValueError(f"step.{field.name} must be seconds of at least 0, not {value!r}")
        if not self.base + self.row > 0:
            raise ValueError("step.base and step.row are both 0: a step takes time")

    def seconds(self, rows: int, cached: float = 0.0, drafts: float = 0.0) -> float:
        """Of one step."""
        return self.base + self.row * rows + self.cached * cached + self.draft * drafts + self.drafting * (drafts > 0)


@dataclass(frozen=True)
class ReplicaCost:
    """What one kind of replica costs and holds.

    Attributes:
        step: Of decoding.
        prefill: Seconds of a prompt token.
        slots: Requests that it decodes at a time (``max_num_seqs``).
        room: Tokens that fit into its KV cache.
        gpus: That it has.

    Raises:
        ValueError: Sizes that cannot be.
    """

    step: StepCost
    prefill: float = 0.0
    slots: int = 256
    room: float = math.inf
    gpus: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.prefill) and self.prefill >= 0):
            raise ValueError(f"prefill must be seconds of at least 0, not {self.prefill!r}")
        for name in ("slots", "room", "gpus"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}")

    def slowed(self, factor: float) -> ReplicaCost:
        """One like it whose work takes so many times as long.

        Raises:
            ValueError: As of the class.
        """
        if factor == 1:
            return self
        step = StepCost(*(factor * getattr(self.step, field.name) for field in fields(StepCost)))
        return replace(self, step=step, prefill=factor * self.prefill)

    def drafted(self, pace: float, overhead: float) -> ReplicaCost:
        """One like it that drafts: what a token costs with drafts, for what a decoding step costs.

        Args:
            pace: Tokens a decoding step, at least 1.
            overhead: Draft tokens verified for each token gained.

        Raises:
            ValueError: Neither is possible.
        """
        if not (1 <= pace < math.inf and 0 <= overhead < math.inf):
            raise ValueError(f"drafts.acceptance must be at least 1 and drafts.overhead 0, not {pace} and {overhead}")
        if pace == 1:
            return self
        step = self.step
        row = step.row + step.draft * (pace - 1) * overhead
        return replace(self, step=StepCost((step.base + step.drafting) / pace, row / pace, step.cached / pace))

    def alone(self, prompt: float, tokens: float) -> float:
        """Seconds of a response that has the replica to itself."""
        step = self.step
        return self.prefill * prompt + tokens * step.seconds(1) + step.cached * tokens * (prompt + tokens / 2)

    def together(
        self, longest: npt.ArrayLike, tokens: npt.ArrayLike, held: npt.ArrayLike, room: npt.ArrayLike | None = None
    ) -> Floats:
        """Seconds until the last of some responses that are begun together is done, in whatever order they end.

        With steps of ``base + row R + cached C`` seconds that is ``base S + row tokens + cached held``: S, the steps
        there are, are all those of the longest response, and as many as bring all tokens through the slots, within the
        cache there is.

        Args:
            longest: Tokens of the longest response.
            tokens: Of all.
            held: Over the steps of all responses, the tokens in their caches: ``n (p + n / 2)`` for n tokens after a
                prompt of p.
            room: Of the cache; ``None``: this kind's.

        Returns:
            float64, of the arguments' common shape.
        """
        room = self.room if room is None else room
        steps = np.maximum(np.maximum(longest, np.divide(tokens, self.slots)), np.divide(held, room))
        return self.step.base * steps + self.step.row * np.asarray(tokens) + self.step.cached * np.asarray(held)


#: Where nobody measured: a 32B model in bf16 over four H800s, reckoned (``planning/profiles``). Plans go by ratios.
TYPICAL = ReplicaCost(StepCost(base=10e-3, row=33e-6, cached=26e-9), prefill=33e-6)


@dataclass(frozen=True)
class TrainingCost:
    """What happens between the rollouts, on the GPUs that train.

    Attributes:
        token: Seconds of a token of prompt and response, log-probs and update together.
        logprobs: Share of that which is log-probs (old and reference): two of eight operations a weight and token.
        update: Seconds of an update beside that.
        part: Seconds of each part but the last, beside its tokens, where an update's samples come in parts (StreamRL,
            arXiv:2504.15930, section 4.1).
        sync: Seconds from an update's end until its weights are in the engines.
        copy: Seconds of these for which the trainer is held where replicas take versions one by one: until the weights
            lie in the relay. ``None``: all of them; so it is where all replicas take a version together.
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
                raise ValueError(f"training.{field.name} must be seconds of at least 0, not {value!r}")
        if self.logprobs > 1:
            raise ValueError(f"training.logprobs must be a share, from 0 to 1, not {self.logprobs!r}")

    def seconds(self, tokens: float, early: float = 0.0, gradients: bool = True) -> float:
        """Of an update of so many tokens once all are there, of which ``early`` had gone through in parts, with their
        gradients or without."""
        return self.update + self.token * (tokens - early * self._ahead(gradients))

    def held(self, one_by_one: bool) -> float:
        """Seconds for which publication holds the trainer (``Rules.one_by_one``)."""
        return min(self.copy, self.sync) if one_by_one and self.copy is not None else self.sync

    def part_seconds(self, tokens: float, gradients: bool = True) -> float:
        """Of a part."""
        return self.part + self.token * tokens * self._ahead(gradients)

    def _ahead(self, gradients: bool) -> float:
        """Share of a token's seconds that need not wait for the whole batch."""
        return 1.0 if gradients else self.logprobs
