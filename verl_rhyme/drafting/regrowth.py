"""Drafts from the previous text of a request that a weight update interrupted and that is regenerated.

Newer weights mostly generate the same tokens again. A pointer marks the expected token. A differing token is first
taken for a substitution, because coupled noise is keyed by position and diverged texts realign at the same position. If
they do not realign within a few tokens, the latest n-gram is searched around the last aligned offset.

The probability of the expected token comes from a table of observed agreement, by kind of alignment and by the length
of agreement since the last difference; every sampled token updates it. The state is a function of the two texts only,
however the response is split into steps. One call of compiled code serves all rows of a step.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from verl_rhyme.compiled import compiled
from verl_rhyme.drafting.kernels import pointer

#: Columns of a request's state: tokens before the response; tokens so far (prompt and response; 0 before the first
#: step); position of the expected token; its position at the last aligned offset; agreeing tokens since the last
#: difference; tokens since the alignment was lost (0 while aligned); whether an n-gram gave the position.
BEGAN, SEEN, POSITION, HOME, RUN, LOST, RELOCATED = range(7)
N_STATE = 7

#: Kinds of alignment: aligned, just after a difference, by an n-gram, none.
STEADY, SUBSTITUTED, BY_NGRAM, ASTRAY = range(4)
KINDS = 4
#: Runs of agreement (tokens) at which a new class begins, besides 0.
_RUNS = (1, 2, 3, 4, 5, 8, 16, 32, 64)

#: Unaligned tokens before an n-gram is searched; last one with a search at every token; tokens between later searches,
#: because texts may have diverged for good.
_PATIENCE, _EAGER, _SELDOM = 3, 16, 8
#: Lengths of the n-gram, and the search distance around the expected position (tokens).
_SHORTEST, _LONGEST = 3, 8
_SEARCH = 4096
#: Agreeing tokens after which the texts count as aligned again: at the old offset, at a new one.
_SETTLED, _SETTLED_ANEW = 2, 6

#: Agreements assumed by the prior (rule of succession), by kind of alignment, and its weight in observations.
_AGREED = (4.0, 1.0, 1.0, 0.1)
_PRIOR = 10.0
_DECAY = 0.998


def prior() -> np.ndarray:
    """Return the initial table, float64[KINDS, runs, 2], which assumes that agreeing texts continue to agree."""
    runs, agreed = np.array([0.0, *_RUNS]), np.array(_AGREED)[:, None]
    accepted = _PRIOR * (runs + agreed) / (runs + agreed + 1)
    return np.stack([accepted, np.full(accepted.shape, _PRIOR)], axis=2)


@compiled
def plan(slots, table, batch, plans, sampled, floor, vocabulary):
    """Take in a step's sampled tokens, and replace plans in place where the previous text promises as much.

    ``table`` is as of :func:`prior`. ``sampled`` is int64[B], sampled tokens of each request in this step, all but one
    of them drafted; at a request's first step its whole response. ``floor`` and ``vocabulary``: see
    :func:`.kernels.plan`. Return bool[B], whether each plan is from a previous text.
    """
    ids, rows, tokens, lengths, limits = batch
    draft, reach, planned = plans
    replaced = np.zeros(len(ids), dtype=np.bool_)
    reached = np.empty(draft.shape[1])
    for b in range(len(ids)):
        size, state = slots.previous_size[ids[b]], slots.regrowth[ids[b]]
        if _over(state, size):
            continue
        previous = carray(pointer(slots.previous[ids[b]]), (size,), dtype=np.int32)
        text, length = tokens[rows[b]], lengths[b]
        if not state[SEEN]:
            state[BEGAN] = state[SEEN] = max(0, length - sampled[b])
        while state[SEEN] < length and not _over(state, size):
            _take(state, table, previous, text, state[SEEN])
            state[SEEN] += 1
        longest = min(limits[b], len(reached))
        count = _walk(state, table, previous, longest, floor, vocabulary, reached)
        if count > 0 and reached[:count].sum() >= reach[b, : planned[b]].sum():
            draft[b, :count] = previous[state[POSITION] : state[POSITION] + count]
            reach[b, :count] = reached[:count]
            planned[b] = count
            replaced[b] = True
    return replaced


@compiled
def _over(state, size):
    return state[POSITION] >= size and state[HOME] >= size


@compiled
def _take(state, table, previous, text, index):
    """Take in ``text[index]``, the response's next token: learn, advance, and search if the alignment is lost."""
    position, run, lost, relocated = state[POSITION], state[RUN], state[LOST], state[RELOCATED]
    hit = False
    if position < len(previous):
        hit = previous[position] == text[index]
        entry = table[_kind(lost, relocated), _class(run)]
        entry[0] = _DECAY * entry[0] + hit
        entry[1] = _DECAY * entry[1] + 1
    position += 1
    home = state[HOME] + 1
    if hit:
        run, lost, relocated = _agreed(run, lost, relocated)
        if not lost:
            home = position
    else:
        run, lost = 0, lost + 1
    # No search while tokens come as expected: substitutions close together look like a lost alignment, and an n-gram
    # found elsewhere would replace the right position.
    if not run and lost > _PATIENCE and (relocated or lost <= _EAGER or lost % _SELDOM == 0):
        position, run = _search(previous, text, state[BEGAN], index, home)
        relocated = np.int64(position != home)
    state[POSITION], state[HOME], state[RUN], state[LOST], state[RELOCATED] = position, home, run, lost, relocated


@compiled
def _walk(state, table, previous, longest, floor, vocabulary, reached):
    """Fill ``reached`` as far as a draft of the expected tokens is above ``floor``; returns its length."""
    position, run, lost, relocated = state[POSITION], state[RUN], state[LOST], state[RELOCATED]
    reach, count = 1.0, 0
    while count < longest and position < len(previous) and 0 <= previous[position] < vocabulary:
        accepted, tried = table[_kind(lost, relocated), _class(run)]
        reach *= accepted / tried
        if reach < floor:
            break
        reached[count] = reach
        count += 1
        position += 1
        run, lost, relocated = _agreed(run, lost, relocated)
    return count


@compiled
def _agreed(run, lost, relocated):
    """Return run, lost and relocated after one more expected token."""
    run += 1
    if lost:
        lost += 1
        if run >= (_SETTLED_ANEW if relocated else _SETTLED):
            lost, relocated = 0, 0
    return run, lost, relocated


@compiled
def _search(previous, text, began, index, home):
    """Return the position after the longest copy of the response's latest tokens, and the copy's length.

    Among equals the nearest to ``home``; ``home`` if no n-gram agrees.
    """
    size, token = len(previous), text[index]
    best, most = home, _agreement(previous, text, began, index, home)
    longest = max(most, _SHORTEST - 1)
    for distance in range(1, min(_SEARCH, max(home, size - home)) + 1):
        if longest == _LONGEST:
            break
        ahead, behind = home + distance, home - distance
        if ahead < size and previous[ahead - 1] == token:
            agreement = _agreement(previous, text, began, index, ahead)
            if agreement > longest:
                best, most, longest = ahead, agreement, agreement
        if 0 < behind < size and previous[behind - 1] == token:
            agreement = _agreement(previous, text, began, index, behind)
            if agreement > longest:
                best, most, longest = behind, agreement, agreement
    return best, most


@compiled
def _agreement(previous, text, began, index, position):
    """Return how many tokens up to ``text[index]`` agree with those before ``position``; 0 if no token would follow."""
    if position >= len(previous):
        return 0
    n = 0
    while n < min(_LONGEST, index + 1 - began, position) and previous[position - 1 - n] == text[index - n]:
        n += 1
    return n


@compiled
def _kind(lost, relocated):
    if not lost:
        return STEADY
    if relocated:
        return BY_NGRAM
    return SUBSTITUTED if lost <= _PATIENCE else ASTRAY


@compiled
def _class(run):
    found = 0
    for start in _RUNS:
        if run >= start:
            found += 1
    return found
