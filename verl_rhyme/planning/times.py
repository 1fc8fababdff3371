"""Time of a training step on replicas and training GPUs, in closed form, for the planner.

Two bounds determine a step. With ``max_staleness`` k and T seconds a step:

- **rollout**: ``T >= W + (L + F) / (k + 1)``. W is the linear work of a batch per replica in seconds (rows, drafts,
  caches, prompts). It does not depend on the order in which responses end, since a decode step of R rows with C cached
  tokens takes ``base + row R + cached C`` seconds (:class:`~verl_rhyme.planning.cost.ReplicaCost`). L is the time of
  the longest response's steps alone. F is the time from the collection of a batch to engines with its policy. A
  response that starts at a version has k + 1 training steps, less F, until its deadline. It gets one decode step for
  each ``base`` seconds that linear work leaves. T is also at least the time to bring all tokens through the slots.
- **trainer**: ``T >= tokens + fixed``.

On-policy, the two overlap only as far as parts of a batch finish before its end. The time lies between the larger and
the sum: ``T = sqrt((W + L)^2 + tokens^2) + fixed``. Otherwise it is the larger of the two bounds.

Colocated engines stop while the actor trains, so F is added: ``T = W + L / (k + 1) + F``.

``tests/unit/planning/test_times_simulated.py`` compares it with the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from verl_rhyme.planning.cost import ReplicaCost

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """An update batch.

    Attributes:
        lengths: float64[N], response tokens; a distribution of which the batch has ``samples`` draws.
        samples: Samples of the batch.
        group: Samples of each prompt.
        prompt_tokens: Tokens of each prompt.
    """

    lengths: Floats
    samples: int
    group: int = 1
    prompt_tokens: float = 0.0

    def __post_init__(self) -> None:
        if not (len(self.lengths) and np.min(self.lengths) > 0 and self.samples >= 1 and self.group >= 1):
            raise ValueError("a batch needs at least one sample, and each sample at least one token")
        if not 0 <= self.prompt_tokens < np.inf:
            raise ValueError(f"prompt_tokens must be at least 0, not {self.prompt_tokens}")

    @cached_property
    def mean(self) -> float:
        return float(np.mean(self.lengths))

    @property
    def tokens(self) -> float:
        return self.mean * self.samples

    @property
    def trained_tokens(self) -> float:
        return self.tokens + self.prompt_tokens * self.samples

    @cached_property
    def held(self) -> float:
        """Cached tokens, summed over a response's steps, on average: ``n (p + n / 2)``."""
        n = np.asarray(self.lengths, dtype=float)
        return float(np.mean(n * (self.prompt_tokens + n / 2)))

    @cached_property
    def variation(self) -> float:
        """Standard deviation of the length over its mean."""
        return float(np.std(self.lengths)) / self.mean

    def longest(self, samples: npt.ArrayLike) -> Floats:
        """Return the tokens of the longest of ``samples`` responses."""
        return np.quantile(self.lengths, 1 - 0.5 / np.maximum(1.0, np.asarray(samples, dtype=float)))

    def longest_left(self, rows: npt.ArrayLike) -> Floats:
        """Return the remaining tokens of the longest of ``rows`` running responses at a random moment, above their
        mean.

        At a random moment a running response has more than x tokens left with the share of tokens that lie more than x
        before their response's end.
        """
        values, shares = self._left
        return np.interp(1 - 1 / (np.asarray(rows, dtype=float) + 1), shares, values) - self._mean_left

    @cached_property
    def _left(self) -> tuple[Floats, Floats]:
        values = np.sort(np.asarray(self.lengths, dtype=float))
        longer = 1 - np.arange(len(values)) / len(values)
        values = np.concatenate([[0.0], values])
        shares = np.concatenate([[0.0], np.cumsum(np.diff(values) * longer)])
        return values, shares / shares[-1]

    @cached_property
    def _mean_left(self) -> float:
        return float(np.mean(np.asarray(self.lengths, dtype=float) ** 2)) / (2 * self.mean)


class _Kind:
    """Seconds of one kind of replica, by its number of samples of a batch (float64[...], above 0)."""

    def __init__(self, cost: ReplicaCost, work: Work) -> None:
        self._cost, self._work = cost, work
        #: Requests that it decodes at a time, by slots and by cache size.
        self.rows = max(1.0, min(float(cost.slots), cost.room * work.mean / work.held))
        self._each = cost.step.row * work.mean + cost.step.cached * work.held

    def busy(self, samples: Floats) -> Floats:
        """Return the seconds of linear work: rows, caches and prompts."""
        cost, work = self._cost, self._work
        prompts = np.minimum(samples, work.samples / work.group)  # siblings share their prompt
        return self._each * samples + cost.prefill * work.prompt_tokens * prompts

    def streamed(self, samples: Floats) -> Floats:
        """Return the seconds to bring all tokens through the slots.

        Running responses are prefilled again under a new policy.
        """
        work = self._work
        again = self._cost.prefill * np.minimum(samples, self.rows) * work.held / work.mean
        return self._cost.step.base * self._filled(samples) + self.busy(samples) + again

    def longest(self, samples: Floats) -> Floats:
        """Return the seconds of decode steps alone, on the replica that finishes a batch last."""
        work, filled = self._work, self._filled(samples)
        replicas = np.maximum(1.0, work.samples / samples)
        uneven = _highest(replicas) * filled * work.variation / np.sqrt(np.maximum(1.0, samples))
        own = work.longest_left(self.rows)
        later = np.hypot(uneven, work.longest_left(self.rows * replicas) - own)
        queued = np.where(samples > self.rows, filled + own + later, filled)
        return self._cost.step.base * np.maximum(work.longest(work.samples), queued)

    def _filled(self, samples: Floats) -> Floats:
        return samples * self._work.mean / self.rows


def _highest(count: Floats) -> Floats:
    """Return the expected maximum of ``count`` normal draws (Blom 1958, "Statistical estimates and transformed
    beta-variables").
    """
    return ndtri((count - 0.375) / (count + 0.25))


def rollout(
    cost: ReplicaCost, count: npt.ArrayLike, work: Work, max_staleness: int = 0, after: npt.ArrayLike = 0.0
) -> Floats:
    """Return the minimum seconds of a training step because of rollout, of the arguments' common shape.

    This is ``P_gen`` of Algorithm 1 (StreamRL, arXiv:2504.15930, section 4.2), with the staleness bound. It is infinite
    without replicas.

    Args:
        cost: Cost of a replica.
        count: float64[...], number of replicas.
        work: An update batch.
        max_staleness: Bound k, in policy versions.
        after: float64[...], seconds from the collection of a batch to engines with its policy (F).
    """
    count = np.asarray(count, dtype=float)
    kind, samples = _Kind(cost, work), work.samples / np.maximum(count, 1.0)
    found = kind.busy(samples) + (kind.longest(samples) + np.asarray(after, dtype=float)) / (max_staleness + 1)
    if max_staleness:
        found = np.maximum(kind.streamed(samples), found)
    return np.where(count > 0, found, np.inf)


def step(rolled_out: Floats, tokens: Floats, fixed: float, on_policy: bool) -> Floats:
    """Return the seconds of a training step on separate engines, where parts of a batch are trained during generation.

    Args:
        rolled_out: Result of :func:`rollout`; on-policy without ``after``.
        tokens: Seconds to train a batch's tokens.
        fixed: Further seconds of a training step and its weights.
        on_policy: Whether ``max_staleness`` is 0.
    """
    if on_policy:
        return np.asarray(np.hypot(rolled_out, tokens) + fixed)
    return np.maximum(rolled_out, tokens + fixed)


def slots(cost: ReplicaCost, count: npt.ArrayLike, work: Work) -> Floats:
    """Return the same for unbounded staleness: all tokens go through slots that are always full."""
    return rollout(cost, count, work, 1 << 30)


@dataclass
class Training:
    """Cost of a training step on GPUs of one kind: ``P_train`` of Algorithm 1 (StreamRL).

    Attributes:
        token: Seconds of one GPU for each prompt and response token, log-probs and update together.
        update: Further seconds of a step, for any number of GPUs.
        copy_gpus: GPUs of one copy of the model (tensor times pipeline parallel size).
        reserve: Bytes of a GPU's memory for activations, buffers and the allocator.
    """

    token: float
    update: float = 0.0
    copy_gpus: int = 1
    reserve: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.token < np.inf and 0 <= self.update < np.inf and self.copy_gpus >= 1 and self.reserve >= 0):
            raise ValueError(f"training needs token above 0, copy_gpus at least 1, other values at least 0: {self}")

    def seconds(self, gpus: npt.ArrayLike, tokens: float, share: float = 1.0) -> Floats:
        """Return the seconds, float64[...], to train a share of ``tokens`` on ``gpus``; ``update`` counts in full."""
        return self.update + share * self.token * tokens / np.asarray(gpus, dtype=float)
