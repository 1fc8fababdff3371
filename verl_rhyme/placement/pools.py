"""Pools: samples in the order of falling length, cut into runs of like ones, each answered by replicas of its own.

What a pool takes is reckoned in one of two ways, from what steps cost (:mod:`verl_rhyme.planning.cost`):

- *in rounds*, StreamRL's latency model (arXiv:2504.15930, section 5): a replica that has M samples and decodes BS of
  them at a time needs ``PTL(BS) L ceil(M / BS)`` seconds. PTL are the seconds of a step of so many rows, L a quantile
  of the pool's lengths, and BS what slots and cache hold of its samples, or M if that is fewer.
- *until the last is done*, with fewer rows as samples end (``ReplicaCost.together``), and no less than the longest one
  takes alone. Where the distributions of lengths are known that one is an expectation. No cut can hide a long sample
  among short ones.

Replicas of several kinds share a pool's samples so that they are done at the same time. They stand in one order, and
pools of longer samples have the earlier ones. Arguments that the compiled functions have in common:

    pool: float64[4], of its samples their number, the length that counts, tokens, and tokens in caches over all steps.
    kinds: float64[K, 5], of each kind base, row and cached seconds of a step, slots and room of the cache.
    ends: int64[K], where each kind ends in the order of the replicas.
    rounds: Which way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from verl_rhyme.planning.cost import Floats

#: Quantiles that stand for the lengths of the tail, and of the rest (Algorithm 2).
_TAIL, _REST = 0.9, 0.5
#: Of an interval of seconds.
_HALVINGS = 40
#: Seconds that differ by such a share are the same: rounding.
_SAME = 1e-9
#: Samples may be cut at so many places, evenly, and as many that lie closely among the longest; of few anywhere.
_CUTS = 32


class Samples(NamedTuple):
    """In the order of falling length; an entry may stand for several that are alike.

    Attributes:
        tokens: float64[P], expected of each.
        number: float64[P], how many.
        begin: float64[P], tokens that each begins with.
        beyond: float64[P, C], the chance that each goes on so far, by cells of tokens; ``None``: nobody knows.
        width: float64[C], tokens of the cells.
    """

    tokens: Floats
    number: Floats
    begin: Floats
    beyond: Floats | None = None
    width: Floats | None = None


class Replicas(NamedTuple):
    """``kinds`` and ``ends``, as above."""

    kinds: Floats
    ends: npt.NDArray[np.int64]


class Pool(NamedTuple):
    """Entries from ``begin`` to ``end`` on the replicas from ``first`` to ``last``.

    Attributes:
        seconds: That it takes.
        share: float64[K], samples that a replica of each kind has done by then, more than 0.
    """

    begin: int
    end: int
    first: int
    last: int
    seconds: float
    share: Floats


@njit(cache=True, nogil=True)
def done(seconds, pool, kind, rounds):
    """Samples of a pool that a replica has done after so many seconds."""
    count, length, tokens, held = pool
    base, row, cached, slots, room = kind
    if not rounds:
        if seconds * (1 + 1e-9) < length * (base + row + cached * length / 2):  # the longest, alone
            return 0.0
        work = row * tokens + cached * held
        share = min(seconds / (base * tokens / slots + work), seconds / (base * held / room + work))
        if work > 0:
            share = min(share, (seconds - base * length) / work)
        return max(0.0, np.floor(share * count * (1 + 1e-9)))
    context = held / tokens
    most = max(1.0, min(slots, np.floor(room / context)))
    more = row + cached * context
    step = seconds / length * (1 + 1e-9)  # one round is done in time with steps of so many seconds
    if step < base + more:
        return 0.0
    return np.floor((step - base) / more) if step < base + more * most else np.floor(step / (base + more * most)) * most


@njit(cache=True, nogil=True)
def needed(first, seconds, pool, kinds, ends, rounds):
    """The end of the replicas that a pool needs from ``first`` on; one more than there are where these do not do."""
    count = pool[0]
    for k in range(len(kinds)):
        if first < ends[k]:
            each = done(seconds, pool, kinds[k], rounds)
            if each * (ends[k] - first) >= count:
                return first + max(1, int(np.ceil(count / each)))
            count -= each * (ends[k] - first)
            first = ends[k]
    return ends[-1] + 1


@njit(cache=True, nogil=True)
def takes(first, last, pool, kinds, ends, rounds):
    """Seconds of a pool on the replicas from ``first`` to ``last``."""
    low, high = 0.0, pool[1] * kinds[:, :2].sum()
    while needed(first, high, pool, kinds, ends, rounds) > last:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if needed(first, middle, pool, kinds, ends, rounds) > last:
            low = middle
        else:
            high = middle
    return high


@njit(cache=True, nogil=True)
def _two(tail, rest, kinds, ends, rounds):
    """float64[2, R - 1], seconds of both pools where the first has 1, 2 ... replicas."""
    total = ends[-1]
    seconds = np.empty((2, total - 1))
    for width in range(1, total):
        seconds[0, width - 1] = takes(0, width, tail, kinds, ends, rounds)
        seconds[1, width - 1] = takes(width, total, rest, kinds, ends, rounds)
    return seconds


@njit(cache=True, nogil=True)
def _cover(bound, between, kinds, ends, before):
    """The fewest replicas on which all samples are done within ``bound``, by a dynamic program over pools and cuts: the
    fewest that do for the samples before a cut leave most to those behind it.

    Args:
        between: float64[C, C, 4], of the samples between two cuts.
        before: int64[pools, C], is filled with the cut at which the last of so many pools begins; -1: of fewer pools.
    """
    cuts, total = len(between), ends[-1]
    used = np.full(cuts, total + 1)
    used[0] = 0
    before[:] = -1
    for p in range(len(before)):
        now = used.copy()
        for j in range(1, cuts):
            for i in range(j):
                if used[i] + 1 < now[j]:
                    last = needed(used[i], bound, between[i, j], kinds, ends, False)
                    if last < now[j]:
                        now[j], before[p, j] = last, i
        used = now
    return used[-1]


def two(samples: Samples, replicas: Replicas, tail: float, objective: str) -> list[Pool]:
    """The longest samples apart from the rest, on so many replicas that the pools' seconds are least; all numbers are
    tried.

    Args:
        samples: At least two entries.
        replicas: At least two.
        tail: Share of the entries in the first pool.
        objective: ``sum``, in rounds, as published; or ``max``, until the last is done.
    """
    rounds, entries = objective == "sum", len(samples.tokens)
    cut = min(max(1, int(tail * entries)), entries - 1)
    between = _between(samples, [0, cut, entries], rounds)
    pools = between[[0, 1], [1, 2]]
    seconds = _two(*pools, *replicas, rounds)
    first, then = seconds.sum(axis=0), seconds.max(axis=0)
    if not rounds:
        first, then = then, first
    then = np.where(first <= first.min() * (1 + _SAME), then, np.inf)
    width = 1 + int(then.argmin())
    return _pools([0, cut, entries], [width, int(replicas.ends[-1]) - width], pools, replicas, rounds)


def several(samples: Samples, replicas: Replicas, most: int) -> list[Pool]:
    """At most so many pools, of which the slowest is done first: a search for its seconds, with cuts and replicas for
    each bound by a dynamic program. What is left over of the replicas goes where it helps, to the slowest first.

    Args:
        samples: At least one entry. Of more than some dozens not every place is tried as a cut.
        replicas: At least one.
        most: Pools.
    """
    total, cuts = int(replicas.ends[-1]), _cuts(len(samples.tokens))
    between = _between(samples, cuts, False)
    before = np.empty((min(most, total, len(cuts) - 1), len(cuts)), np.int64)
    low, high = 0.0, takes(0, total, between[0, -1], *replicas, False)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _cover(middle, between, *replicas, before) > total:
            low = middle
        else:
            high = middle
    _cover(high, between, *replicas, before)
    found = [len(cuts) - 1]
    for begins in before[::-1, :]:
        if begins[found[-1]] >= 0:
            found.append(int(begins[found[-1]]))
    found.reverse()
    pools, ends = between[found[:-1], found[1:]], [0]
    for pool in pools:
        ends.append(needed(ends[-1], high, pool, *replicas, False))
    widths = _filled(np.diff(ends).tolist(), pools, replicas)
    return _pools([cuts[i] for i in found], widths, pools, replicas, False)


def _filled(widths: list[int], pools: Floats, replicas: Replicas) -> list[int]:
    """Replicas by pool, with those that are left over."""
    seconds = _seconds(widths, pools, replicas, False)
    for _ in range(int(replicas.ends[-1]) - sum(widths)):
        for slowest in np.argsort(-seconds, kind="stable").tolist():
            more = [width + (i == slowest) for i, width in enumerate(widths)]
            then = _seconds(more, pools, replicas, False)
            if then[slowest] < seconds[slowest] * (1 - _SAME) and then.max() <= seconds.max() * (1 + _SAME):
                widths, seconds = more, then
                break
        else:
            break
    return [*widths[:-1], int(replicas.ends[-1]) - sum(widths[:-1])]


def _seconds(widths: Sequence[int], pools: Floats, replicas: Replicas, rounds: bool) -> Floats:
    """float64[pools]."""
    ends = np.cumsum(widths).tolist()
    return np.array(
        [takes(end - width, end, pool, *replicas, rounds) for width, end, pool in zip(widths, ends, pools, strict=True)]
    )


def _pools(cuts: Sequence[int], widths: Sequence[int], pools: Floats, replicas: Replicas, rounds: bool) -> list[Pool]:
    seconds, lasts = _seconds(widths, pools, replicas, rounds), np.cumsum(widths).tolist()
    found = []
    for i, (width, last, pool) in enumerate(zip(widths, lasts, pools, strict=True)):
        share = np.array([done(seconds[i], pool, kind, rounds) for kind in replicas.kinds])
        found.append(Pool(cuts[i], cuts[i + 1], last - width, last, float(seconds[i]), np.maximum(share, 1e-3)))
    return found


def _cuts(entries: int) -> list[int]:
    """Where samples may be cut, rising, both ends included."""
    if entries <= _CUTS:
        return list(range(entries + 1))
    even, close = np.linspace(0, entries, _CUTS), np.geomspace(1, entries, _CUTS)
    return [int(at) for at in np.unique(np.rint(np.concatenate([even, close])))]


def _between(samples: Samples, cuts: Sequence[int], rounds: bool) -> Floats:
    """float64[C, C, 4], ``pool`` of the samples from a cut (first axis) to a later one."""
    tokens = np.maximum(samples.tokens, 1.0)
    sums = np.stack([np.ones(len(tokens)), tokens, tokens * (samples.begin + tokens / 2)], axis=-1)
    sums = np.concatenate([np.zeros((1, 3)), np.cumsum(samples.number[:, None] * sums, axis=0)])
    count, total, held = np.moveaxis(sums[None, cuts] - sums[cuts][:, None], -1, 0)
    ordered = np.triu(np.ones((len(cuts), len(cuts)), bool), 1)  # all others are no pools
    if rounds:
        quantile = np.where(np.arange(len(cuts)) == 0, _TAIL, _REST)[:, None]
        place = np.searchsorted(sums[1:, 0], sums[cuts, 0][:, None] + (1 - quantile) * count, side="right")
        length = tokens[np.clip(place, 0, len(tokens) - 1)]
    elif samples.beyond is None or samples.width is None:
        length = np.broadcast_to(tokens[np.minimum(cuts, len(tokens) - 1)][:, None], count.shape)
    else:  # of the longest of them, from the chance that none goes on
        logs = samples.number[:, None] * np.log1p(-np.minimum(samples.beyond, 1 - 1e-6))
        none = np.concatenate([np.zeros((1, logs.shape[1])), np.cumsum(logs, axis=0)])[cuts]
        chance = 1 - np.exp(np.minimum(none[None] - none[:, None], 0))
        length = np.maximum(chance @ samples.width, 1.0)
    return np.where(ordered[:, :, None], np.stack([count, length, total, held], axis=-1), 1.0)
