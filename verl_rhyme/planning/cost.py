"""Seconds of a replica's work, by a few coefficients, for planner and simulator.

A decode step of R rows, with C tokens in their KV caches and D draft tokens to verify, takes::

    base + expert u(R + D) + row R + cached C + draft D + (drafting + waiting R) [D > 0]

The base is the time to read the weights that all tokens share. Of a mixture's experts a step reads those that its
tokens choose: u(n) = E (1 - (1 - k/E)^n) of a layer's E, if n tokens choose k each, independently. ``cached C`` is the
time to read the caches. A step is memory-bound until rows and drafts are many. A prefill of P tokens takes ``prefill
P``, and no row advances meanwhile. Engines that mix prefill with decoding (chunked prefill) lose the same time, spread
out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_rhyme.planning.experts import Experts

Floats = npt.NDArray[np.float64]


def _check_seconds(record: object, section: str) -> None:
    for name, value in vars(record).items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{section}.{name} must be seconds, at least 0, not {value!r}")


@dataclass(unsafe_hash=True)
class StepCost:
    """Coefficients of a decode step, in seconds; see the module."""

    base: float  # of a step
    row: float = 0.0  # of each request in it
    cached: float = 0.0  # of each cached token
    draft: float = 0.0  # of each verified draft token
    drafting: float = 0.0  # of a step with drafts, for which the device waits for the host
    waiting: float = 0.0  # likewise, of each request in it
    expert: float = 0.0  # of each loaded expert, in all layers of a mixture
    experts: int = 0  # of a layer
    chosen: float = 0.0  # experts that a token chooses, or a row with its draft tokens

    def __post_init__(self) -> None:
        _check_seconds(self, "step")
        if self.chosen > self.experts:
            raise ValueError(f"step.chosen must be at most step.experts, {self.experts}, not {self.chosen}")
        if not self.base + self.row > 0:
            raise ValueError("step.base and step.row are both 0: set one above 0, since a step takes time")

    def seconds(self, rows: int, cached: float = 0.0, drafts: float = 0.0) -> float:
        waits = (self.drafting + self.waiting * rows) * (drafts > 0)
        return self.weights(rows + drafts) + self.row * rows + self.cached * cached + self.draft * drafts + waits

    def weights(self, tokens: Any) -> Any:
        """Return the seconds to read the weights for a step of so many tokens; both float64[...]."""
        return self.base + self.expert * Experts(self.experts, self.chosen).loaded(tokens)


@dataclass(unsafe_hash=True)
class ReplicaCost:
    """Cost and capacity of one kind of replica."""

    step: StepCost
    prefill: float = 0.0  # seconds of a prompt token
    slots: int = 256  # requests that it decodes at a time (max_num_seqs)
    room: float = math.inf  # tokens that fit into its KV cache
    gpus: int = 1
    host: float = 0.0  # tokens whose KV is kept in host memory when the cache evicts it
    load: float = 2.3e-6  # seconds of a token that is loaded from there

    def __post_init__(self) -> None:
        for name in ("prefill", "load"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name} must be seconds, at least 0, not {getattr(self, name)!r}")
        for name in ("slots", "room", "gpus"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}")

    def slowed(self, factor: float) -> ReplicaCost:
        if factor == 1:
            return self
        seconds = [field.name for field in fields(StepCost) if field.name not in ("experts", "chosen")]
        step = replace(self.step, **{name: factor * getattr(self.step, name) for name in seconds})
        return replace(self, step=step, prefill=factor * self.prefill)

    def drafted(self, pace: float, overhead: float) -> ReplicaCost:
        """Return the cost by token where a step makes ``pace``, with ``overhead`` draft tokens for each gained one."""
        if not (1 <= pace < math.inf and 0 <= overhead < math.inf):
            raise ValueError(f"drafts.acceptance must be at least 1 and drafts.overhead 0, not {pace} and {overhead}")
        if pace == 1:
            return self
        step = self.step
        drafts = (pace - 1) * overhead
        row = step.row + step.waiting + step.draft * drafts
        chosen = Experts(step.experts, step.chosen).loaded(1 + drafts)
        mixture = {"expert": step.expert / pace, "experts": step.experts, "chosen": chosen}
        base = (step.base + step.drafting) / pace
        return replace(self, step=StepCost(base, row / pace, step.cached / pace, **mixture))

    def together(
        self, longest: npt.ArrayLike, tokens: npt.ArrayLike, held: npt.ArrayLike, room: npt.ArrayLike | None = None
    ) -> Floats:
        """Return the seconds until the last of some responses that start together ends, in any order of ends.

        That is ``weights S + row tokens + cached held``, with enough steps S for the longest response, and for all
        tokens in the slots and in the cache, and with the weights of a step with the mean number of rows. ``held`` are
        cached tokens, summed over the steps of all responses: ``n (p + n / 2)`` for n tokens after a prompt of p.
        ``room`` are the tokens that fit into the cache (``None``: this kind's).
        """
        room = self.room if room is None else room
        steps = np.maximum(np.maximum(longest, np.divide(tokens, self.slots)), np.divide(held, room))
        weights = self.step.weights(np.asarray(tokens) / np.maximum(steps, 1e-9))
        return weights * steps + self.step.row * np.asarray(tokens) + self.step.cached * np.asarray(held)


#: Where model or GPU of a run are unknown: the roofline of a 32B model over four H800s. Only ratios count.
TYPICAL = ReplicaCost(StepCost(base=10e-3, row=33e-6, cached=26e-9), prefill=33e-6)


@dataclass
class TrainingCost:
    """Seconds of the work between rollouts, on the training GPUs."""

    token: float = 0.0  # of a prompt or response token, log-probs and update together
    update: float = 0.0  # further ones of a training step
    part: float = 0.0  # further ones of each part of a batch but the last (StreamRL, arXiv:2504.15930, section 4.1)
    sync: float = 0.0  # from a training step's end until its weights are in the engines
    reward: float = 0.0  # from a response's end to its reward
    #: Those of ``sync`` that block the trainer where replicas take versions one by one; ``None``: all.
    copy: float | None = None

    def __post_init__(self) -> None:
        _check_seconds(self, "training")

    def blocked_s(self, one_by_one: bool) -> float:
        """Return the seconds for which publication blocks the trainer (``Rules.one_by_one``)."""
        return min(self.copy, self.sync) if one_by_one and self.copy is not None else self.sync
