"""Suffix array over the reversed text of a prompt's responses, to find earlier occurrences of the latest tokens.

The text is ``[-1, r0..., -1, r1..., -1]``. Token ids are not negative, so no match can cross a separator, and no search
needs bounds checks. An entry ``p`` of the array stands for the tokens read backwards from ``text[p]``. Entries that
share the last k tokens of a context are adjacent, and the token after each of them is ``text[p + 1]``.

Entries are compared by at most :data:`DEPTH` tokens and never beyond their response; equal entries keep the order of
the text. Their order therefore does not depend on other responses. Entries of new responses are sorted separately and
merged into the array, and a removed response takes its entries along.

Every numba function here is self-contained: numba's disk cache does not notice a change in another file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from verl_rhyme.compiled import compiled

if TYPE_CHECKING:
    from verl_rhyme.history.record import PromptHistory

#: Token between responses and at both ends of the text.
SEPARATOR = -1

#: Number of tokens by which entries are sorted; longer contexts are matched up to this length.
DEPTH = 64
#: Most entries that are sorted by comparing their texts; more are sorted by keys of several tokens.
_FEW = 16
#: Key bits per pass of the radix sort.
_DIGIT = 11


def join(responses: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Join m responses into one text, int32[n], and positions of its separators, int32[m + 1].

    Response i is ``text[bounds[i] + 1 : bounds[i + 1]]``.
    """
    lengths = np.fromiter((len(r) + 1 for r in responses), dtype=np.int64, count=len(responses))
    bounds = np.zeros(len(responses) + 1, dtype=np.int32)
    bounds[1:] = np.cumsum(lengths)
    text = np.full(int(bounds[-1]) + 1, SEPARATOR, dtype=np.int32)
    for response, start, end in zip(responses, bounds[:-1], bounds[1:], strict=True):
        text[start + 1 : end] = response
    return text, bounds


def build(tokens: np.ndarray, begin: int, known: np.ndarray) -> np.ndarray:
    """Build the suffix array of the reversed text from :func:`join`, int32[n], without its separators.

    The new text begins at the separator at ``begin``; ``known`` is the suffix array of the text before it, int32[k].
    Return positions, int32[n - m - 1] for m responses, ordered by the tokens read backwards from each.
    """
    text = np.asarray(tokens, dtype=np.int32)
    bits = max(1, (int(text.max()) + 1).bit_length())
    each = min(64 // bits, DEPTH // 2)
    new, keys = _sorted(text, begin, bits, each)
    return _merged(text, known, new, keys, bits, each) if len(known) else new


def longest_match(history: PromptHistory, context: np.ndarray, max_len: int) -> tuple[int, int, int]:
    """Find the longest match to the latest tokens of ``context``, int32[c], newest last.

    Return ``(length, lo, hi)``: ``history.suffixes[lo:hi]`` are all positions where its last ``length`` tokens end.
    ``length`` is at most ``max_len`` and :data:`DEPTH`. ``(0, 0, n)`` if the newest token does not occur.
    """
    latest = context[max(0, len(context) - min(max_len, DEPTH)) :]
    # The compiled code accepts contiguous int32 arrays only.
    return _longest_match(history.tokens, history.suffixes, np.array(latest, dtype=np.int32))


def warm() -> None:
    """Compile all functions here, or load them from numba's disk cache, so that no request waits."""
    text, bounds = join([np.array([1, 2, 3], dtype=np.int32)])
    suffixes = build(text, 0, np.zeros(0, dtype=np.int32))
    suffixes = build(np.concatenate([text, text[1:]]), int(bounds[-1]), suffixes)
    drop_responses(suffixes, np.array([[0, 9, 0]], dtype=np.int32))
    _longest_match(text, suffixes, text)
    first_tokens(text)


@compiled
def _longest_match(text, suffixes, context):
    low, high = 0, len(suffixes)
    length = 0
    while length < len(context):
        token = context[len(context) - 1 - length]
        if token < 0:
            break
        # Entries of [low, high) match `length` tokens and are ordered by the token before those.
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


@compiled
def first_tokens(text):
    """Return the range of entries of each token in the suffix array, for the first step of a search.

    A hash table, int32[2**k, 3]: token (-1 in a free row), first entry, entry after the last. A token is in the row of
    its lowest k bits or the next free row after it; at least half of the rows are free.
    """
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
    distinct = np.empty(known, dtype=np.int64)  # token and row, to be sorted by token
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


@compiled
def _key(text, position, depth, bits, each):
    """Return a sort key of the next ``each`` tokens, from ``depth`` on backwards.

    Its lowest token is 0 if the response or the compared depth ends within these; entries with such a key are equal.
    """
    key = np.uint64(0)
    taken = 0
    while taken < min(each, DEPTH - depth):
        token = text[position - depth - taken]
        key = (key << np.uint64(bits)) | np.uint64(token + 1)
        taken += 1
        if token < 0:
            break
    return key << np.uint64(bits * (each - taken))


@compiled
def _before(text, one, other, depth):
    """Return whether an entry comes before another one, given that they match on ``depth`` tokens."""
    while depth < DEPTH:
        a, b = text[one - depth], text[other - depth]
        if a != b:
            return a < b
        if a < 0:
            return False
        depth += 1
    return False


@compiled
def _sorted(text, begin, bits, each):
    """Return the sorted entries of ``text[begin:]``, int32[n], and their keys at depth 0, uint64[n]."""
    n = 0
    for position in range(begin, len(text)):
        n += text[position] >= 0
    order, spare = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.int32)
    keys, spare_keys = np.empty(n, dtype=np.uint64), np.empty(n, dtype=np.uint64)
    n = 0
    for position in range(begin, len(text)):
        if text[position] >= 0:
            order[n], keys[n] = position, _key(text, position, 0, bits, each)
            n += 1
    low = np.uint64((1 << _DIGIT) - 1)
    free = np.empty((1 << _DIGIT) + 1, dtype=np.int64)
    for shift in range(0, bits * each, _DIGIT):  # radix sort, the lowest digit first
        free[:] = 0
        for i in range(n):
            free[((keys[i] >> np.uint64(shift)) & low) + np.uint64(1)] += 1
        for digit in range(1 << _DIGIT):
            free[digit + 1] += free[digit]
        for i in range(n):
            digit = (keys[i] >> np.uint64(shift)) & low
            spare[free[digit]], spare_keys[free[digit]] = order[i], keys[i]
            free[digit] += 1
        order, spare = spare, order
        keys, spare_keys = spare_keys, keys
    _refine(text, order, keys.copy(), bits, each)
    return order, keys


@compiled
def _refine(text, order, keys, bits, each):
    """Sort entries with equal keys to the full depth; all entries are sorted by their keys at depth 0 already.

    ``order`` and ``keys`` are changed in place. A key has ``each`` tokens of ``bits`` bits.
    """
    last_token = np.uint64((1 << bits) - 1)
    groups = np.empty((len(order) // 2 + 1, 3), dtype=np.int32)  # stack of first entry, end, and depth of the match
    end, waiting = 0, 0
    while end < len(order) or waiting:
        if waiting:
            waiting -= 1
            low, high, depth = groups[waiting, 0], groups[waiting, 1], groups[waiting, 2]
        else:
            low, high, depth = end, end + 1, each
            while high < len(order) and keys[high] == keys[low]:
                high += 1
            end = high
            if keys[low] & last_token == 0:
                continue
        if high - low <= _FEW:
            for i in range(low + 1, high):
                entry = order[i]
                while i > low and _before(text, entry, order[i - 1], depth):
                    order[i] = order[i - 1]
                    i -= 1
                order[i] = entry
            continue
        alike = True
        for i in range(low, high):
            keys[i] = _key(text, order[i], depth, bits, each)
            alike &= keys[i] == keys[low]
        if not alike:
            sort = np.argsort(keys[low:high], kind="mergesort")  # stable
            order[low:high] = order[low:high][sort]
            keys[low:high] = keys[low:high][sort]
        first = low
        for i in range(low + 1, high + 1):
            if i == high or keys[i] != keys[first]:
                if i - first > 1 and keys[first] & last_token and depth + each < DEPTH:
                    groups[waiting, 0], groups[waiting, 1], groups[waiting, 2] = first, i, depth + each
                    waiting += 1
                first = i


@compiled
def _merged(text, old, new, new_keys, bits, each):
    """Merge two sorted arrays of entries; of equal entries those of ``old`` come first."""
    last_token = np.uint64((1 << bits) - 1)
    old_keys = np.empty(len(old), dtype=np.uint64)  # in a separate loop, so that memory loads overlap
    for i in range(len(old)):
        old_keys[i] = _key(text, old[i], 0, bits, each)
    merged = np.empty(len(old) + len(new), dtype=np.int32)
    i = 0
    for j in range(len(new)):
        key = new_keys[j]
        whole = key & last_token == 0
        while i < len(old) and (
            old_keys[i] < key or (old_keys[i] == key and (whole or not _before(text, new[j], old[i], each)))
        ):
            merged[i + j] = old[i]
            i += 1
        merged[i + j] = new[j]
    merged[i + len(new) :] = old[i:]
    return merged


@compiled
def drop_responses(suffixes, spans):
    """Return the suffix array of a text after the removal of responses.

    ``spans`` are rows (start, stop, shift), int32[k, 3]: positions from start to before stop stay, and move down.
    """
    kept = np.empty(len(suffixes), dtype=np.int32)
    n = 0
    for entry in suffixes:
        for i in range(len(spans)):
            if spans[i, 0] <= entry < spans[i, 1]:
                kept[n] = entry - spans[i, 2]
                n += 1
                break
    return kept[:n]
