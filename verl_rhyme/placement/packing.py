"""Requests on replicas by what they may yet need: compiled, for plans of many thousands.

Of a replica count, cell by cell of tokens to come (:mod:`verl_rhyme.lengths.outlook`): ``none``, the chance that none
of its requests goes on so far, and ``cached``, the tokens expected in its cache then; and ``sums`` of its requests: how
many, tokens to come, and tokens in their caches over all steps to come.

Arguments that all have in common:

    beyond: float64[N, C], of the requests, as in an outlook; prompts: float64[N], tokens that each begins with.
    tokens, held: float64[N], that each adds to the sums.
    bounds: float64[C + 1], of the cells.
    none, cached: float64[R, C]; sums: float64[R, 3]. They are changed: what is placed counts.
    cost: base, row and cached seconds (``StepCost``), and slots.
    rooms: float64[R], of the caches.
    where: int64[N], is filled with replicas; -1: none.
"""

from __future__ import annotations

import numpy as np
from numba import njit

#: Replicas with the least to do, of which one is chosen.
_CHOICE = 12


@njit(cache=True, nogil=True)
def seconds(longest, peak, count, tokens, held, cost, room):
    """What a replica needs for all that it has (``ReplicaCost.together``): where slots or cache do not hold them all
    at a time, some begin late, and the longest of these may be among the last."""
    base, row, cached, slots = cost
    rounds = max(1.0, count / slots, peak / room)
    steps = max(longest, tokens / slots, held / room) + longest * (1 - 1 / rounds) / 2
    return base * steps + row * tokens + cached * held


@njit(cache=True, nogil=True)
def _with(i, r, beyond, prompts, tokens, held, bounds, none, cached, sums, cost, rooms):
    """Seconds of a replica with a request more, and its cache's peak."""
    longest = peak = 0.0
    for c in range(len(bounds) - 1):
        longest += (bounds[c + 1] - bounds[c]) * (1 - none[r, c] * (1 - beyond[i, c]))
        peak = max(peak, cached[r, c] + beyond[i, c] * (prompts[i] + (bounds[c + 1] + bounds[c]) / 2))
    count, total, caches = sums[r, 0] + 1, sums[r, 1] + tokens[i], sums[r, 2] + held[i]
    return seconds(longest, peak, count, total, caches, cost, rooms[r]), peak


@njit(cache=True, nogil=True)
def _add(i, r, beyond, prompts, tokens, held, bounds, none, cached, sums):
    for c in range(len(bounds) - 1):
        none[r, c] *= 1 - beyond[i, c]
        cached[r, c] += beyond[i, c] * (prompts[i] + (bounds[c + 1] + bounds[c]) / 2)
    sums[r, 0] += 1
    sums[r, 1] += tokens[i]
    sums[r, 2] += held[i]


@njit(cache=True, nogil=True)
def pack(beyond, prompts, tokens, held, bounds, none, cached, sums, cost, rooms, where, order, bound):
    """Fill the replicas one after another, in ``order``, each for ``bound`` seconds; True when all found a place."""
    at = i = 0
    while i < len(beyond):
        if at == len(order):
            return False
        r = order[at]
        needs, _ = _with(i, r, beyond, prompts, tokens, held, bounds, none, cached, sums, cost, rooms)
        if needs > bound:
            at += 1
            continue
        _add(i, r, beyond, prompts, tokens, held, bounds, none, cached, sums)
        where[i] = r
        i += 1
    return True


@njit(cache=True, nogil=True)
def _least(values, found):
    """Fill ``found`` with the indices of the least values, in no order."""
    greatest = 0
    for i in range(len(found)):
        found[i] = i
        greatest = i if values[i] > values[found[greatest]] else greatest
    for i in range(len(found), len(values)):
        if values[i] < values[found[greatest]]:
            found[greatest] = i
            for j in range(len(found)):
                if values[found[j]] > values[found[greatest]]:
                    greatest = j


@njit(cache=True, nogil=True)
def spread(beyond, prompts, tokens, held, bounds, none, cached, sums, cost, rooms, where, now, after):
    """Each request, in their order, goes where all is done first.

    Args:
        now: float64[R], seconds that each replica needs for what it has. It is changed.
        after: int64[N], the request before it whose replica is its own as well; -1: none.
    """
    asked = np.arange(min(_CHOICE, len(now)))
    for i in range(len(beyond)):
        if after[i] >= 0:
            r = where[after[i]]
            now[r], _ = _with(i, r, beyond, prompts, tokens, held, bounds, none, cached, sums, cost, rooms)
            _add(i, r, beyond, prompts, tokens, held, bounds, none, cached, sums)
            where[i] = r
            continue
        if len(now) > _CHOICE:
            _least(now, asked)
        best, least, most = asked[0], np.inf, np.inf
        for r in asked:
            needs, _ = _with(i, r, beyond, prompts, tokens, held, bounds, none, cached, sums, cost, rooms)
            if needs < least * (1 - 1e-9) or (needs <= least * (1 + 1e-9) and sums[r, 0] < most):
                best, least, most = r, needs, sums[r, 0]
        _add(i, best, beyond, prompts, tokens, held, bounds, none, cached, sums)
        where[i], now[best] = best, least
    return where


@njit(cache=True, nogil=True)
def admit(beyond, prompts, tokens, held, bounds, none, cached, sums, cost, rooms, where):
    """Of requests that have a place, in their order, those begin that find a slot and room there; others get none."""
    for i in range(len(beyond)):
        r = where[i]
        _, peak = _with(i, r, beyond, prompts, tokens, held, bounds, none, cached, sums, cost, rooms)
        if sums[r, 0] >= 0.5 and (sums[r, 0] + 1 > cost[3] + 0.5 or peak > rooms[r]):
            where[i] = -1
        else:
            _add(i, r, beyond, prompts, tokens, held, bounds, none, cached, sums)
    return where


@njit(cache=True, nogil=True)
def judge(beyond, prompts, bounds, longest, sums, cost, rooms, where, draws, share):
    """Mean over some draws of lengths of the seconds until the last replica is done.

    Args:
        longest: float64[R], steps expected of what a replica has.
        draws: float64[K, N], uniform.
        share: float64[N], steps for each of its tokens.
    """
    mean = 0.0
    cells = len(bounds) - 1
    for k in range(len(draws)):
        last, total, caches, count = longest.copy(), sums[:, 1].copy(), sums[:, 2].copy(), sums[:, 0].copy()
        for i in range(len(beyond)):
            r, c = where[i], 0
            while c < cells and beyond[i, c] > draws[k, i]:
                c += 1
            n = bounds[c] if c == 0 or c == cells else (bounds[c] + bounds[c - 1]) / 2
            steps = n * share[i]
            last[r] = max(last[r], steps)
            total[r] += steps
            caches[r] += steps * (prompts[i] + n / 2)
            count[r] += 1
        worst = 0.0
        for r in range(len(last)):
            worst = max(worst, seconds(last[r], 0.0, count[r], total[r], caches[r], cost, rooms[r]))
        mean += worst / len(draws)
    return mean
