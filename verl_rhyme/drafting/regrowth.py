"""Drafts from the text that a request had before a weight update cut it short and that it now generates anew.

Newer weights mostly say the same again, token by token, so that the previous text is drafted in long windows. A pointer
into it says which token comes next. Where the response says another one, that is first taken for a substitution: the
pointer goes on at the same offset, because coupled noise is keyed by position, and texts that part fall into step again
at the same position. Where they do not within a few tokens, the response's latest n-gram is looked for in the previous
text, around where the offset held last: tokens were inserted or deleted.

How sure is it that the expected token comes? A table of what came, by how the texts are aligned and how long they have
agreed since they last differed, follows every token that is sampled, drafted or not. The pointer's state is a function
of the two texts alone, however the response is cut into steps.

A state machine, no clock, no thread; all rows of a step are served by one call of compiled code.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from verl_rhyme.drafting.arrays import RegrowthArrays
from verl_rhyme.drafting.kernels import pointer

#: Columns of the state: tokens before the response and so far (prompt and response; -1 before the first step), the
#: position of the expected token, where it would be at the offset that held last, tokens agreed on since the last
#: difference, tokens since the texts fell out of step (0 while in step), whether an n-gram gave the position; whether
#: the latest plan is from the previous text, tokens of such plans that were accepted.
BEGAN, SEEN, POSITION, HOME, RUN, LOST, RELOCATED, DRAFTS, REVERIFIED = range(9)
N_STATE = 9

#: How the texts are aligned: in step, just after a difference, by an n-gram, not at all.
STEADY, SUBSTITUTED, BY_NGRAM, ASTRAY = range(4)
KINDS = 4
#: Runs of agreement (tokens) at which a new class begins, beside 0.
_RUNS = (1, 2, 3, 4, 5, 8, 16, 32, 64)

#: Tokens out of step before an n-gram is looked for; up to when at every token, and from then on at every so many, as
#: texts may have parted for good.
_PATIENCE, _EAGER, _SELDOM = 3, 16, 8
#: Its lengths, and how far around the expected position it is looked for (tokens).
_SHORTEST, _LONGEST = 3, 8
_SEARCH = 4096
#: Tokens agreed on after which the texts are in step again: at the old offset, at a new one.
_SETTLED, _SETTLED_ANEW = 2, 6

#: The prior is the rule of succession after so many agreements, by kind; it counts as so many observations.
_AGREED = (4.0, 1.0, 1.0, 0.1)
_PRIOR = 10.0
_DECAY = 0.998


class Regrowth:
    """Previous texts by slot of the adaptive drafter, and what their tokens are worth.

    Args:
        slots: Requests that run at a time.
    """

    def __init__(self, slots: int):
        self._slots = _arrays(slots)
        self._texts: dict[int, np.ndarray] = {}  # slot to the array whose address it holds
        #: float64[KINDS, runs, 2]: accepted and tried, both decayed.
        self.table = prior()

    def __len__(self) -> int:
        """Requests that have a previous text."""
        return len(self._texts)

    def start(self, slot: int, previous: np.ndarray | None) -> None:
        """Begin a request anew.

        Args:
            slot: Where it lives.
            previous: Integers [n], tokens of its response before; ``None`` or empty where there is none.
        """
        self.stop(slot)
        self._slots.state[slot] = 0
        if previous is None or not len(previous):
            return
        text = self._texts[slot] = np.array(previous, dtype=np.int32)
        self._slots.previous[slot], self._slots.size[slot] = text.ctypes.data, len(text)
        self._slots.state[slot, SEEN] = -1

    def stop(self, slot: int) -> None:
        """End a request; its text is let go."""
        self._slots.size[slot] = 0
        self._texts.pop(slot, None)

    def reverified(self, slot: int) -> int:
        """Accepted tokens that were drafted from the previous text."""
        return int(self._slots.state[slot, REVERIFIED])

    def grow(self) -> None:
        """Twice the slots."""
        old, count = self._slots, len(self._slots.size)
        self._slots = _arrays(2 * count)
        for new_array, old_array in zip(self._slots, old, strict=True):
            new_array[:count] = old_array

    def plan(
        self,
        ids: np.ndarray,
        rows: np.ndarray,
        tokens: np.ndarray,
        lengths: np.ndarray,
        sampled: np.ndarray,
        limits: np.ndarray,
        floor: float,
        vocabulary: int,
        draft: np.ndarray,
        reach: np.ndarray,
        planned: np.ndarray,
    ) -> np.ndarray:
        """Take in what a step sampled, and replace the plans of those rows whose previous text promises as much.

        Args:
            ids: int32[B], slots.
            rows: int32[B], their rows of ``tokens``.
            tokens: int32[rows, positions], prompt and response of each request so far.
            lengths: int64[B], tokens of each.
            sampled: int64[B], tokens that this step gave each, all but one of them drafted; at a request's first step
                all that its response has.
            limits: int64[B], draft tokens each may have.
            floor: Plan a token only if its probability to be reached and accepted is at least this.
            vocabulary: Token ids that may be drafted are below it.
            draft: int32[B, K], plans so far, replaced in place.
            reach: float64[B, K], the probability that each token is reached and accepted, likewise.
            planned: int64[B], tokens of each plan, likewise.

        Returns:
            bool[B], the plans that are from a previous text.
        """
        if not self._texts:
            return np.zeros(len(ids), dtype=np.bool_)
        return _plan(
            self._slots,
            self.table,
            ids,
            rows,
            tokens,
            lengths,
            sampled,
            limits,
            floor,
            vocabulary,
            draft,
            reach,
            planned,
        )


def prior() -> np.ndarray:
    """float64[KINDS, runs, 2]: a table that has seen nothing but that what agreed goes on agreeing."""
    runs, agreed = np.array([0.0, *_RUNS]), np.array(_AGREED)[:, None]
    accepted = _PRIOR * (runs + agreed) / (runs + agreed + 1)
    return np.stack([accepted, np.full(accepted.shape, _PRIOR)], axis=2)


def _arrays(slots: int) -> RegrowthArrays:
    return RegrowthArrays(
        previous=np.zeros(slots, dtype=np.int64),
        size=np.zeros(slots, dtype=np.int64),
        state=np.zeros((slots, N_STATE), dtype=np.int64),
    )


@njit(cache=True, nogil=True)
def _plan(slots, table, ids, rows, tokens, lengths, sampled, limits, floor, vocabulary, draft, reach, planned):
    replaced = np.zeros(len(ids), dtype=np.bool_)
    reached = np.empty(draft.shape[1])
    for b in range(len(ids)):
        size, state = slots.size[ids[b]], slots.state[ids[b]]
        if state[DRAFTS]:
            state[REVERIFIED] += sampled[b] - 1
            state[DRAFTS] = 0
        if _over(state, size):
            continue
        previous = carray(pointer(slots.previous[ids[b]]), (size,), dtype=np.int32)
        text, length = tokens[rows[b]], lengths[b]
        if state[SEEN] < 0:
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
            state[DRAFTS] = 1
            replaced[b] = True
    return replaced


@njit(cache=True, nogil=True)
def _over(state, size):
    """Whether the response stands beyond the previous text, or there is none."""
    return state[POSITION] >= size and state[HOME] >= size


@njit(cache=True, nogil=True)
def _take(state, table, previous, text, index):
    """Take in ``text[index]``, the response's next token: learn, go on, and look around where the way is lost."""
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
    # Never while a token comes as expected: substitutions close together look like a lost way, and an n-gram found
    # elsewhere would lead away from the right one.
    if not run and lost > _PATIENCE and (relocated or lost <= _EAGER or lost % _SELDOM == 0):
        position, run = _search(previous, text, state[BEGAN], index, home)
        relocated = np.int64(position != home)
    state[POSITION], state[HOME], state[RUN], state[LOST], state[RELOCATED] = position, home, run, lost, relocated


@njit(cache=True, nogil=True)
def _walk(state, table, previous, longest, floor, vocabulary, reached):
    """Fill ``reached`` as far as a draft of the expected tokens pays; returns its length."""
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


@njit(cache=True, nogil=True)
def _agreed(run, lost, relocated):
    """Run, lost, and relocated after one more token that was the expected one."""
    run += 1
    if lost:
        lost += 1
        if run >= (_SETTLED_ANEW if relocated else _SETTLED):
            lost, relocated = 0, 0
    return run, lost, relocated


@njit(cache=True, nogil=True)
def _search(previous, text, began, index, home):
    """The position after the longest copy of the response's latest tokens, the one nearest to ``home``.

    Returns:
        The position and the tokens that agree before it; ``home`` where no n-gram agrees.
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


@njit(cache=True, nogil=True)
def _agreement(previous, text, began, index, position):
    """Tokens up to ``text[index]`` that agree with those before ``position``; 0 where nothing would follow."""
    if position >= len(previous):
        return 0
    n = 0
    while n < min(_LONGEST, index + 1 - began, position) and previous[position - 1 - n] == text[index - n]:
        n += 1
    return n


@njit(cache=True, nogil=True)
def _kind(lost, relocated):
    if not lost:
        return STEADY
    if relocated:
        return BY_NGRAM
    return SUBSTITUTED if lost <= _PATIENCE else ASTRAY


@njit(cache=True, nogil=True)
def _class(run):
    found = 0
    for start in _RUNS:
        if run >= start:
            found += 1
    return found
