"""Suffix array over the reversed text of a prompt's responses: where have the latest tokens been seen before?

The text is ``[-1, r0..., -1, r1..., -1]``: token ids are not negative, so no match can cross a separator and no search
needs to look at bounds. An entry ``p`` of the array stands for the tokens read backwards from ``text[p]``; entries that
share the last k tokens of a context lie side by side, and what followed each of them is ``text[p + 1]``.

Every numba function here is self-contained: numba's disk cache does not notice a change in another file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numba import njit

#: Stands between responses and at both ends of the text.
SEPARATOR = -1

#: Entries are sorted by this many tokens; longer contexts are matched up to here.
DEPTH = 64


class Index(Protocol):
    """What :func:`longest_match` searches; ``PromptHistory`` is one."""

    @property
    def tokens(self) -> np.ndarray: ...

    @property
    def suffixes(self) -> np.ndarray: ...


def join(responses: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Lay responses out as one text.

    Args:
        responses: m arrays of token ids, none negative.

    Returns:
        The text, int32[n], and the positions of its separators, int32[m + 1]: response i is
        ``text[bounds[i] + 1 : bounds[i + 1]]``.
    """
    lengths = np.fromiter((len(r) + 1 for r in responses), dtype=np.int64, count=len(responses))
    bounds = np.zeros(len(responses) + 1, dtype=np.int32)
    bounds[1:] = np.cumsum(lengths)
    text = np.full(int(bounds[-1]) + 1, SEPARATOR, dtype=np.int32)
    for response, start, end in zip(responses, bounds[:-1], bounds[1:], strict=True):
        text[start + 1 : end] = response
    return text, bounds


def build(tokens: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Suffix array of the reversed text, without its separators.

    Prefix doubling (Manber and Myers, SIAM J. Comput. 22(5), 1993) stopped at :data:`DEPTH` tokens.

    Args:
        tokens, bounds: As :func:`join` makes them, int32[n] and int32[m + 1].

    Returns:
        int32[n - m - 1], positions in ``tokens``, ordered by the tokens read backwards from each.
    """
    order = _sort_backwards(np.array(tokens, dtype=np.int32), DEPTH)
    return order[len(bounds) :]  # a separator is the least token: the m + 1 of them come first


def first_tokens(tokens: np.ndarray) -> np.ndarray:
    """Where the entries of each token begin and end in the suffix array: the first step of a search in it.

    Found from the text alone, read from front to back: a millisecond for 500k tokens.

    Args:
        tokens: int32[n], as :func:`join` makes it.

    Returns:
        int32[2**k, 3], a hash table: token, first entry, entry after the last; -1 for the token where there is none.
        A token lies at its lowest k bits or at the next free place after it; at least half of the places are free.
    """
    return _first_tokens(np.asarray(tokens, dtype=np.int32))


def longest_match(index: Index, context: np.ndarray, max_len: int) -> tuple[int, int, int]:
    """Find where the latest tokens were seen before, the longest agreement first.

    Args:
        index: The text and its suffix array.
        context: int32[c], the latest tokens, newest last.
        max_len: Tokens of the context to compare, at most; more than :data:`DEPTH` counts as :data:`DEPTH`.

    Returns:
        ``(length, lo, hi)``: ``index.suffixes[lo:hi]`` are all the positions at which the last ``length`` tokens of the
        context end; no position agrees with more. ``(0, 0, n)`` when not even the newest token is there.
    """
    return _longest_match(index.tokens, index.suffixes, tail(context, min(max_len, DEPTH)))


def tail(context: np.ndarray, length: int) -> np.ndarray:
    """The last ``length`` tokens as the one array type the compiled code knows: a fresh, contiguous int32 copy."""
    return np.array(context[max(0, len(context) - length) :], dtype=np.int32)


def warm() -> None:
    """Compile (or load from numba's disk cache) everything here, so that no request waits for it."""
    text, bounds = join([np.array([1, 2, 3], dtype=np.int32)])
    suffixes = build(text, bounds)
    _longest_match(text, suffixes, tail(text, 1))
    first_tokens(text)


@njit(cache=True, nogil=True)
def _longest_match(text, suffixes, context):
    low, high = 0, len(suffixes)
    length = 0
    while length < len(context):
        token = context[len(context) - 1 - length]
        if token < 0:
            break
        # Entries of [low, high) agree on `length` tokens and are ordered by the one before those.
        first, last = low, high
        while first < last:
            middle = (first + last) // 2
            if text[suffixes[middle] - length] < token:
                first = middle + 1
            else:
                last = middle
        start, last = first, high
        while first < last:
            middle = (first + last) // 2
            if text[suffixes[middle] - length] <= token:
                first = middle + 1
            else:
                last = middle
        if start == first:
            break
        low, high = start, first
        length += 1
    return length, low, high


@njit(cache=True, nogil=True)
def _first_tokens(text):
    table = np.full((16, 3), -1, dtype=np.int32)
    known = 0
    for token in text:
        if token < 0:
            continue
        mask = len(table) - 1
        at = token & mask
        while table[at, 0] != token:
            if table[at, 0] < 0:
                table[at, 0], table[at, 1] = token, 0
                known += 1
                break
            at = (at + 1) & mask
        table[at, 1] += 1
        if 2 * known > mask:
            larger = np.full((2 * len(table), 3), -1, dtype=np.int32)
            mask = len(larger) - 1
            for i in range(len(table)):
                if table[i, 0] >= 0:
                    at = table[i, 0] & mask
                    while larger[at, 0] >= 0:
                        at = (at + 1) & mask
                    larger[at] = table[i]
            table = larger
    distinct = np.empty(known, dtype=np.int64)  # token and place, to be sorted by token
    n = 0
    for i in range(len(table)):
        if table[i, 0] >= 0:
            distinct[n] = (np.int64(table[i, 0]) << 32) | i
            n += 1
    distinct.sort()
    first = 0
    for both in distinct:
        at = both & 0xFFFFFFFF
        count = table[at, 1]
        table[at, 1] = first
        table[at, 2] = first + count
        first += count
    return table


@njit(cache=True, nogil=True)
def _sort_backwards(text, depth):
    n = len(text)
    order = np.arange(n, dtype=np.int32)
    spare = np.empty(n, dtype=np.int32)
    top = text.max() + 1
    # Depth 1: radix sort by token, 8 bits at a time (separators are -1, hence the + 1).
    shift = 0
    counts = np.empty(257, dtype=np.int64)
    while (top >> shift) > 0:
        counts[:] = 0
        for i in range(n):
            counts[(((text[i] + 1) >> shift) & 255) + 1] += 1
        for digit in range(256):
            counts[digit + 1] += counts[digit]
        for i in range(n):
            position = order[i]
            digit = ((text[position] + 1) >> shift) & 255
            spare[counts[digit]] = position
            counts[digit] += 1
        order, spare = spare, order
        shift += 8
    # A rank is the place of its class's first entry: the next free place of each class needs no histogram.
    rank = np.empty(n, dtype=np.int32)
    classes = 0
    head = 0
    for i in range(n):
        if i == 0 or text[order[i]] != text[order[i - 1]]:
            head = i
            classes += 1
        rank[order[i]] = head
    free = np.empty(n, dtype=np.int32)
    refined = np.empty(n, dtype=np.int32)
    agreed = 1
    while agreed < depth and classes < n:
        for i in range(n):
            free[i] = i
        # Positions in the order of the `agreed` tokens that precede their own `agreed`; none precede the first ones.
        for position in range(min(agreed, n)):
            slot = rank[position]
            spare[free[slot]] = position
            free[slot] += 1
        for i in range(n):
            position = order[i] + agreed
            if position < n:
                slot = rank[position]
                spare[free[slot]] = position
                free[slot] += 1
        order, spare = spare, order
        classes = 0
        head = 0
        before_rank = -1
        before_second = -1
        for i in range(n):
            position = order[i]
            second = rank[position - agreed] if position >= agreed else -1
            if i == 0 or rank[position] != before_rank or second != before_second:
                head = i
                classes += 1
            before_rank = rank[position]
            before_second = second
            refined[position] = head
        rank, refined = refined, rank
        agreed *= 2
    return order
