"""How long an update takes on a fleet of replicas and on GPUs that train, in closed form: what a planner reckons with.

What the rows and caches of a batch cost a replica does not depend on the order in which its responses end, since steps
of R rows with C cached tokens take ``base + row R + cached C`` seconds
(:class:`~verl_rhyme.scheduling.cost.ReplicaCost`). Only the number of steps does: it is looked at by the longest
response, by the slots, and by what chance makes of both. All replicas are taken to get as much as they can do in equal
time. ``python -m benchmarks.allocation`` and a test hold it against the simulator.

A step of the run then depends on what may overlap (``Work`` is one update batch, T a step's seconds, D those of
training and of weights on their way):

- nothing (``staleness=0``): generation, then D;
- batches (``staleness`` versions, engines go on with what they have under new weights): a batch is under way for
  ``W = (staleness + 1) T - D`` seconds, of which the rows of all batches take ``busy / T``; the rest has to be
  enough for the steps of the longest response: :func:`_overlapped`;
- training (a staleness of 1, ``drains``: a replica takes new weights when it has come to the end of its share): each
  replica works off its share, then begins the next, and may be late by one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from verl_rhyme.scheduling.cost import ReplicaCost

Floats = npt.NDArray[np.float64]

#: Of two bounds that a step is held to now by one, now by the other: the power of their mean, which lies above both. By
#: simulated runs of 2 to 16 replicas.
_SOFT = 6
#: Halvings of the interval in which a mixed fleet's time is looked for, and points of its kinds' curves.
_HALVINGS, _POINTS = 40, 256


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
    """Seconds of one kind of replica, by the samples of a batch that each one gets (float64[...], above 0)."""

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
        """As many as bring all tokens through its slots."""
        return self._cost.step.base * self._filled(samples) + self.busy(samples)

    def alone(self, samples: Floats) -> Floats:
        """Until all are done that are begun together, on an average replica."""
        work = self._work
        queued = self._filled(samples) + np.where(samples > self.rows, work.longest_left(self.rows), 0.0)
        return self._cost.step.base * np.maximum(work.longest(samples), queued) + self.busy(samples)

    def last(self, samples: Floats) -> Floats:
        """The same, on the replica that is the last to be done."""
        return self.floor(samples) + self.busy(samples)

    def floor(self, samples: Floats) -> Floats:
        """Of the steps alone, on the replica that is the last to be done."""
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


def _overlapped(busy: Floats, floor: Floats, between: Floats, staleness: int) -> Floats:
    """T of ``((staleness + 1) T - between) (1 - busy / T) = floor``: see the module."""
    batches = staleness + 1
    b = between + batches * busy + floor
    return (b + np.sqrt(np.maximum(0.0, b * b - 4 * batches * between * busy))) / (2 * batches)


@dataclass(frozen=True)
class Overlap:
    """What of generation and training goes on at once.

    Attributes:
        staleness: Policy versions between a trained token and the policy it trains, at most.
        drains: A replica takes new weights when nothing runs there that began under older ones
            (``sorting.keep_running``); else all go on under the new ones with what they have.

    Raises:
        ValueError: Not reckoned.
    """

    staleness: int = 1
    drains: bool = False

    def __post_init__(self) -> None:
        if self.staleness < 0 or (self.drains and self.staleness != 1):
            raise ValueError(
                f"staleness {self.staleness} with drains={self.drains}: staleness must be at least 0, and 1 where "
                "replicas drain"
            )


def generation(
    fleet: Sequence[tuple[ReplicaCost, npt.ArrayLike]], work: Work, overlap: Overlap, between: float = 0.0
) -> Floats:
    """Seconds that a step takes at least because of generation: ``P_gen`` of Algorithm 1 (StreamRL, arXiv:2504.15930,
    section 4.2), for the overlap there is.

    Args:
        fleet: Kinds of replica, and how many there are of each: float64[...], all of one shape.
        work: The batch.
        overlap: See the module.
        between: Seconds of training and of weights on their way, after generation or beside it.

    Returns:
        float64, of the counts' shape; infinite where there is no replica. Where nothing overlaps, generation alone.
    """

    def seconds(kind: _Kind, samples: Floats) -> Floats:
        if not overlap.staleness:
            return kind.last(samples)
        if overlap.drains:
            late = (kind.last(samples) + between) / 2
            return (kind.alone(samples) ** _SOFT + late**_SOFT) ** (1 / _SOFT)
        busy, floor = kind.busy(samples), kind.floor(samples)
        root = _overlapped(busy, floor, np.asarray(between), overlap.staleness)
        return np.maximum(kind.streamed(samples), root)

    counts = [np.asarray(count, dtype=float) for _, count in fleet]
    total = np.sum(counts, axis=0)
    kinds = [_Kind(cost, work) for cost, _ in fleet]
    if len(kinds) == 1:
        found = seconds(kinds[0], work.samples / np.maximum(total, 1.0))
    else:
        found = _level(kinds, counts, work.samples, seconds)
    return np.where(total > 0, found, np.inf)


def _level(kinds: Sequence[_Kind], counts: Sequence[Floats], samples: int, seconds: object) -> Floats:
    """The time in which the kinds together do all samples, each as many as it can."""
    some = np.geomspace(1e-3, samples, _POINTS)
    curves = [np.maximum.accumulate(seconds(kind, some)) for kind in kinds]  # type: ignore[operator]
    low, high = np.zeros_like(counts[0]), np.full_like(counts[0], max(curve[-1] for curve in curves))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        done = sum(
            count * np.interp(middle, curve, some, left=0.0) for count, curve in zip(counts, curves, strict=True)
        )
        low, high = np.where(done < samples, middle, low), np.where(done < samples, high, middle)
    return high


@dataclass(frozen=True)
class Training:
    """An update on GPUs of one kind: ``P_train`` of Algorithm 1.

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

    def seconds(self, gpus: npt.ArrayLike, tokens: float) -> Floats:
        """Of an update of so many tokens on so many GPUs, float64[...]."""
        return self.update + self.token * tokens / np.asarray(gpus, dtype=float)


def step(generated: Floats, trained: Floats, weights: float, transfer: float, overlap: Overlap) -> Floats:
    """Seconds of a step of the run.

    Args:
        generated: :func:`generation`, with ``trained + weights + transfer`` between.
        trained: Of training.
        weights: Until the actor has handed out its weights.
        transfer: On their way over a slow link, which carries each version once.
        overlap: See the module.
    """
    if not overlap.staleness:
        return generated + trained + weights + transfer
    return np.maximum(np.maximum(generated, trained + weights), transfer)
