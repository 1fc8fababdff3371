"""How long an update takes on a fleet of replicas and on GPUs that train, in closed form: what the planner goes by.

Two bounds explain a step (docs/studies/planner.md). With ``max_staleness`` k and T seconds a step:

- **rollout**: ``T >= W + (L + F) / (k + 1)``. W: seconds of linear work of an update per replica (rows, drafts,
  caches, prompts), which does not depend on the order in which responses end, since a decode step of R rows with C
  cached tokens takes ``base + row R + cached C`` seconds (:class:`~verl_rhyme.planning.cost.ReplicaCost`). L: steps
  of the longest response alone. F: from the collection of a batch to engines with its policy. What starts at a version
  has k + 1 updates less F until it is due, and gets a step for each ``base`` seconds that linear work leaves. And
  ``T >=`` what brings all tokens through the slots.
- **trainer**: ``T >= tokens + fixed``.

On-policy the two overlap only as far as parts of a batch are finished before its end: between the larger and the sum,
``T = sqrt((W + L)^2 + tokens^2) + fixed``. Between versions the larger of the two floors it is.

Colocated engines stop while the actor trains, so that F is outside: ``T = W + L / (k + 1) + F``.

``python -m benchmarks.studies.allocation`` and
``tests/unit/simulation/test_allocation_times.py`` hold it against the simulator.
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
        lengths: float64[N], response tokens; they stand for a distribution, of which the batch has ``samples`` draws.
        samples: Of the batch.
        group: Of each prompt.
        prompt_tokens: Of each prompt.

    Raises:
        ValueError: Nothing to do.
    """

    lengths: Floats
    samples: int
    group: int = 1
    prompt_tokens: float = 0.0

    def __post_init__(self) -> None:
        if not (len(self.lengths) and np.min(self.lengths) > 0 and self.samples >= 1 and self.group >= 1):
            raise ValueError("a batch needs samples, and each of them a token")
        if not 0 <= self.prompt_tokens < np.inf:
            raise ValueError(f"prompt_tokens must be at least 0, not {self.prompt_tokens}")

    @cached_property
    def mean(self) -> float:
        """Tokens of a response."""
        return float(np.mean(self.lengths))

    @property
    def tokens(self) -> float:
        """Of all responses."""
        return self.mean * self.samples

    @property
    def trained_tokens(self) -> float:
        """Of all responses and their prompts."""
        return self.tokens + self.prompt_tokens * self.samples

    @cached_property
    def held(self) -> float:
        """Over a response's steps, the tokens in its cache, on average: ``n (p + n / 2)``."""
        n = np.asarray(self.lengths, dtype=float)
        return float(np.mean(n * (self.prompt_tokens + n / 2)))

    @cached_property
    def variation(self) -> float:
        """Standard deviation of a length, over its mean."""
        return float(np.std(self.lengths)) / self.mean

    def longest(self, samples: npt.ArrayLike) -> Floats:
        """Tokens of the longest of so many responses."""
        return np.quantile(self.lengths, 1 - 0.5 / np.maximum(1.0, np.asarray(samples, dtype=float)))

    def longest_left(self, rows: npt.ArrayLike) -> Floats:
        """Of so many responses that run at a random moment: what the longest has still to go, above their mean.

        At a random moment one that runs has more than x to go with the share of tokens that lie more than x before
        their response's end.
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
    """Seconds of one kind of replica, by the samples of a batch that each gets (float64[...], above 0)."""

    def __init__(self, cost: ReplicaCost, work: Work) -> None:
        self._cost, self._work = cost, work
        #: Requests that it decodes at a time: by its slots, and by what its cache has room for.
        self.rows = max(1.0, min(float(cost.slots), cost.room * work.mean / work.held))
        self._each = cost.step.row * work.mean + cost.step.cached * work.held

    def busy(self, samples: Floats) -> Floats:
        """Of rows, caches and prompts, whatever the steps."""
        cost, work = self._cost, self._work
        prompts = np.minimum(samples, work.samples / work.group)  # siblings share theirs
        return self._each * samples + cost.prefill * work.prompt_tokens * prompts

    def streamed(self, samples: Floats) -> Floats:
        """As many as bring all tokens through its slots; what runs at a new policy is prefilled again under it."""
        work = self._work
        again = self._cost.prefill * np.minimum(samples, self.rows) * work.held / work.mean
        return self._cost.step.base * self._filled(samples) + self.busy(samples) + again

    def longest(self, samples: Floats) -> Floats:
        """Of the steps alone, on the replica that is the last to be done with a batch."""
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
    """The highest of so many normal draws, expected (Blom 1958, "Statistical estimates and transformed
    beta-variables")."""
    return ndtri((count - 0.375) / (count + 0.25))


def rollout(
    cost: ReplicaCost, count: npt.ArrayLike, work: Work, max_staleness: int = 0, after: npt.ArrayLike = 0.0
) -> Floats:
    """Seconds that a step takes at least because of rollout: ``P_gen`` of Algorithm 1 (StreamRL, arXiv:2504.15930,
    section 4.2), with the bound of staleness in it.

    Args:
        cost: Of a replica.
        count: float64[...], how many there are.
        work: An update batch.
        max_staleness: Bound k, in policy versions.
        after: Seconds from the collection of a batch to engines with its policy (F), float64[...].

    Returns:
        float64, of the common shape; infinite where there is no replica.
    """
    count = np.asarray(count, dtype=float)
    kind, samples = _Kind(cost, work), work.samples / np.maximum(count, 1.0)
    found = kind.busy(samples) + (kind.longest(samples) + np.asarray(after, dtype=float)) / (max_staleness + 1)
    if max_staleness:
        found = np.maximum(kind.streamed(samples), found)
    return np.where(count > 0, found, np.inf)


def step(rolled_out: Floats, tokens: Floats, fixed: float, on_policy: bool) -> Floats:
    """Seconds of a step on separate engines, of which an update's parts are trained while the rest is generated.

    Args:
        rolled_out: What :func:`rollout` allows; on-policy without ``after``.
        tokens: Seconds of training an update's tokens.
        fixed: Seconds of an update and its weights beside that.
        on_policy: ``max_staleness`` is 0.
    """
    if on_policy:
        return np.asarray(np.hypot(rolled_out, tokens) + fixed)
    return np.maximum(rolled_out, tokens + fixed)


def slots(cost: ReplicaCost, count: npt.ArrayLike, work: Work) -> Floats:
    """The same of an unbounded staleness: all tokens through slots that are always full."""
    return rollout(cost, count, work, 1 << 30)


@dataclass(frozen=True)
class Training:
    """An update on GPUs of one kind: ``P_train`` of Algorithm 1 (StreamRL).

    Attributes:
        token: Seconds of one GPU for each token of prompts and responses, log-probs and update together.
        update: Seconds of an update beside that, whatever the GPUs.
        copy_gpus: GPUs of one copy of the model (tensor times pipeline parallel size).
        reserve: Bytes of a GPU's memory for activations, buffers and the allocator.

    Raises:
        ValueError: Sizes that cannot be.
    """

    token: float
    update: float = 0.0
    copy_gpus: int = 1
    reserve: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.token < np.inf and 0 <= self.update < np.inf and self.copy_gpus >= 1 and self.reserve >= 0):
            raise ValueError(f"training needs seconds above 0 a token, and sizes of at least 1: {self}")

    def seconds(self, gpus: npt.ArrayLike, tokens: float, share: float = 1.0) -> Floats:
        """Of an update of so many tokens on so many GPUs, float64[...]; of a share of its tokens, with all that it
        takes beside them."""
        return self.update + share * self.token * tokens / np.asarray(gpus, dtype=float)
