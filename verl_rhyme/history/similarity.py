"""How much of a response stood in its prompt's visit before: the premise of drafting from history.

A token counts where it lies in a run of at least :data:`MATCH` tokens that some response of the visit before has as
well. Short runs agree by chance, too: how often, the last visit of another prompt tells, the one that came before in
the same append. A hash table of those runs is made for each prompt, in time linear in its tokens; runs are compared,
not only their hashes. An append spends at most :data:`BUDGET` tokens on it, and a quarter of that on chance, on the
prompts that come first: a sample of a large one, which would take as long as indexing does.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np
from numba import njit

from verl_rhyme.config import PaperOptions
from verl_rhyme.history.record import PromptHistory, Trajectory

#: Tokens that must agree in a row: as many as the drafter of RhymeRL asks for (``match_min``).
MATCH = PaperOptions().match_min
#: Tokens, new and old, that are compared in one append (about 50 ns each).
BUDGET = 1 << 21
CHANCE_BUDGET = BUDGET // 4


@dataclass
class Account:
    """Of one append.

    Attributes:
        compared, similar: Tokens whose prompt had a visit before, and those of them that stood in it.
        by_chance_compared, by_chance_similar: Tokens that were held against another prompt's, and those that stood
            there.
    """

    compared: int = 0
    similar: int = 0
    by_chance_compared: int = 0
    by_chance_similar: int = 0
    _left: int = BUDGET
    _chance_left: int = CHANCE_BUDGET
    _others: list[np.ndarray] = field(default_factory=list)

    def add(self, history: PromptHistory, group: Sequence[Trajectory]) -> None:
        """New responses to a prompt, and what is kept of it without them."""
        if self._left <= 0:
            return
        same, of = compare(history, group)
        self._left -= of + len(history.tokens)
        self.similar, self.compared = self.similar + same, self.compared + of
        if self._chance_left <= 0:
            return
        if of and self._others:
            self.by_chance_similar += shared_tokens(self._others, [t.tokens for t in group])
            self.by_chance_compared += of
            self._chance_left -= of + sum(map(len, self._others))
        if earlier := previous_visit(history, {t.visit for t in group}):
            self._others = [text.copy() for text in earlier]  # the store's own may be overwritten


def previous_visit(history: PromptHistory, visits: Set[int]) -> list[np.ndarray]:
    """Responses of the visit recorded last, but for ``visits``, each int32[length]; none where there is none."""
    others = np.flatnonzero(~np.isin(history.visit, list(visits)))
    if not len(others):
        return []
    return [history.response(i) for i in others[history.visit[others] == history.visit[others[-1]]]]


def compare(history: PromptHistory, group: Sequence[Trajectory]) -> tuple[int, int]:
    """Tokens of ``group`` that stood in its prompt's previous visit, and its tokens; (0, 0) without one.

    Args:
        history: Of the prompt, before the group is added.
        group: New responses to the prompt.
    """
    earlier = previous_visit(history, {t.visit for t in group})
    if not earlier:
        return 0, 0
    return shared_tokens(earlier, [t.tokens for t in group]), sum(len(t.tokens) for t in group)


def shared_tokens(earlier: Sequence[np.ndarray], responses: Sequence[np.ndarray], match: int = MATCH) -> int:
    """Tokens of ``responses`` within runs of ``match`` tokens or more that an earlier one has as well.

    Args:
        earlier, responses: Token ids, int[length] each, none negative.
        match: At least 1.
    """
    return int(_shared(_joined(earlier), _joined(responses), match))


def _joined(texts: Sequence[np.ndarray]) -> np.ndarray:
    """One text, int32, with a -1 after each: no run crosses it."""
    end = np.array([-1], dtype=np.int32)
    return np.concatenate([part for text in texts for part in (np.asarray(text, dtype=np.int32), end)] or [end])


@njit(cache=True, nogil=True)
def _shared(old, new, match):
    size = 16
    while size < 2 * len(old):
        size *= 2
    mask = np.uint64(size - 1)
    table = np.full(size, -1, dtype=np.int64)  # where a run of old begins
    for build in range(2):
        text = old if build == 0 else new
        shared = 0
        marked = 0  # tokens of new before this one are counted, or not to be
        whole = 0  # tokens since the last separator
        for last in range(len(text)):
            whole = whole + 1 if text[last] >= 0 else 0
            if whole < match:
                continue
            first = last - match + 1
            code = np.uint64(1469598103934665603)
            for i in range(first, last + 1):
                code = (code ^ np.uint64(text[i])) * np.uint64(1099511628211)
                code ^= code >> np.uint64(29)
            slot = np.int64(code & mask)
            found = False
            while table[slot] >= 0:
                found = True
                for i in range(match):
                    if old[table[slot] + i] != text[first + i]:
                        found = False
                        break
                if found:
                    break
                slot = np.int64((np.uint64(slot) + np.uint64(1)) & mask)
            if build == 0:
                if not found:
                    table[slot] = first
            elif found:
                shared += last + 1 - max(first, marked)
                marked = last + 1
    return shared
