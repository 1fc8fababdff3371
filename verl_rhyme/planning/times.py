"""Time of a training step on replicas and training GPUs, in closed form, for the planner.

Two bounds determine a step. With ``max_staleness`` k and T seconds a step:

- **rollout**: ``T >= W + (L + F) / (k + 1)``. W is the linear work of a batch per replica in seconds (rows, drafts,
  caches, prompts). It does not depend on the order in which responses end, since a decode step of R rows with C cached
  tokens takes ``base + row R + cached C`` seconds (:class:`~verl_rhyme.planning.cost.ReplicaCost`), of a mixture with
  the base of the rows that run then. L is the time of
  the longest response's steps alone. F is the time from the collection of a batch to engines with its policy. A
  response that starts at a version has k + 1 training steps, less F, until its deadline. It gets one decode step for
  each ``base`` seconds that linear work leaves. T is also at least the time to bring all tokens through the slots.
- **trainer**: ``T >= tokens + fixed``.

On-policy, the two overlap only as far as parts of a batch finish before its end. The time lies between the larger and
the sum: ``T = sqrt((W + L)^2 + tokens^2) + fixed``. Otherwise it is the larger of the two bounds. Colocated engines
stop while the actor trains, so F is added: ``T = W + L / (k + 1) + F``.

``tests/unit/planning/test_times_simulated.py`` compares it with the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from verl_rhyme.planning.cost import ReplicaCost, StepCost

Floats = npt.NDArray[np.float64]
#: Moments of a batch at which its running responses are counted.
_POINTS = 256


@dataclass(frozen=True)
class Work:
    """An update batch."""

    lengths: Floats  # float64[N], response tokens; a distribution of which the batch has ``samples`` draws
    samples: int
    group: int = 1  # samples of each prompt
    prompt_tokens: float = 0.0  # of each prompt

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

    @property
    def held_by_request(self) -> float:
        """Cached tokens of a running request, at a random moment."""
        return self.held / self.mean

    def longest(self, samples: float) -> float:
        return float(np.quantile(self.lengths, 1 - 0.5 / max(1.0, samples)))

    def weights(self, step: StepCost, samples: Floats, rows: float, batches: int) -> Floats:
        """Return the mean seconds to read the weights in a step, float64[...].

        A replica has ``samples`` of each of so many ``batches``, which start in turns while the longest response runs,
        and decodes at most ``rows``.
        """
        if not step.expert:
            return np.full_like(samples, step.base)
        points = max(1, _POINTS // batches)
        times = self.longest(self.samples) * (np.arange(batches * points) + 0.5) / (batches * points)
        left = 1 - np.searchsorted(np.sort(self.lengths), times) / len(self.lengths)
        running = samples[..., None] * left.reshape(batches, points).sum(axis=0)
        return np.asarray(step.weights(np.clip(running, 1.0, rows))).mean(axis=-1)

    def longest_left(self, rows: float) -> float:
        """Return the remaining tokens of the longest of ``rows`` running responses at a random moment, above their
        mean.

        A running response then has more than x tokens left with the share of tokens that lie more than x before their
        response's end.
        """
        lengths = np.sort(np.asarray(self.lengths, dtype=float))
        longer = 1 - np.arange(len(lengths)) / len(lengths)
        shares = np.cumsum(np.diff(lengths, prepend=0.0) * longer)
        left = np.interp(1 - 1 / (rows + 1), [0.0, *(shares / shares[-1])], [0.0, *lengths])
        return float(left) - float(np.mean(lengths**2)) / (2 * self.mean)


def rollout(
    cost: ReplicaCost, count: npt.ArrayLike, work: Work, max_staleness: int = 0, after: npt.ArrayLike = 0.0
) -> Floats:
    """Return the minimum seconds of a training step because of rollout; infinite without replicas.

    This is ``P_gen`` of Algorithm 1 (StreamRL, arXiv:2504.15930, section 4.2), with the staleness bound. ``count`` and
    ``after`` are float64[...]: replicas, and F, the seconds from the collection of a batch to engines with its policy.
    """
    count = np.asarray(count, dtype=float)
    samples = work.samples / np.maximum(count, 1.0)
    rows = max(1.0, min(float(cost.slots), cost.room / work.held_by_request))  # requests that it decodes at a time
    prompts = np.minimum(samples, work.samples / work.group)  # siblings share their prompt
    linear = (cost.step.row * work.mean + cost.step.cached * work.held) * samples
    linear = linear + cost.prefill * work.prompt_tokens * prompts
    filled = samples * work.mean / rows  # decode steps that bring all tokens through the slots
    alone, full = work.longest(work.samples), cost.step.weights(rows)
    weights = work.weights(cost.step, samples, rows, max_staleness + 1)
    queued = filled * full + np.where(samples > rows, work.longest_left(rows) * weights, 0.0)
    longest = np.maximum(alone * weights, queued)
    found = linear + (longest + np.asarray(after, dtype=float)) / (max_staleness + 1)
    if max_staleness:  # running responses are prefilled again under a new policy
        again = cost.prefill * np.minimum(samples, rows) * work.held_by_request
        found = np.maximum(full * filled + linear + again, found)
    return np.where(count > 0, found, np.inf)


@dataclass
class Training:
    """Cost of a training step on GPUs of one kind: ``P_train`` of Algorithm 1 (StreamRL)."""

    token: float  # seconds of one GPU for each prompt and response token, log-probs and update together
    update: float = 0.0  # further seconds of a step, for any number of GPUs
    copy_gpus: int = 1  # GPUs of one copy of the model (tensor times pipeline parallel size)
    reserve: float = 0.0  # bytes of a GPU's memory for activations, buffers and the allocator

    def __post_init__(self) -> None:
        if not (0 < self.token < np.inf and 0 <= self.update < np.inf and self.copy_gpus >= 1 and self.reserve >= 0):
            raise ValueError(f"training needs token above 0, copy_gpus at least 1, other values at least 0: {self}")

    def seconds(self, gpus: npt.ArrayLike, tokens: float, share: float = 1.0) -> Floats:
        """Return float64[...], seconds to train a share of ``tokens`` on ``gpus``; ``update`` counts in full."""
        return self.update + share * self.token * tokens / np.asarray(gpus, dtype=float)
