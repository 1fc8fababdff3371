"""Choice of the continuation to draft: a walk down the trie of continuations of a match.

The occurrences of a match are positions in the text. At each draft position the candidates are the tokens that follow
the occurrences which agree with the draft so far; the end of a response is a candidate as well. A candidate ``c`` that
follows the set ``O(c)`` of occurrences has::

    votes(c) = |O(c)| + reward_weight * mean(scaled reward of the response of o, for o in O(c))

with rewards scaled to [0, 1] over the prompt's history (``PromptHistory.scaled_reward``). The candidate with the most
votes is drafted, and only its occurrences continue. Among equals the one recorded last wins, then the first one found.
The draft stops at its limit, or where the end of a response wins.
"""

from __future__ import annotations

import numpy as np

from verl_rhyme.compiled import compiled
from verl_rhyme.history.record import PromptHistory

#: Most occurrences used; a more frequent match is sampled evenly, to bound the cost of a draft.
MAX_OCCURRENCES = 64


def choose(history: PromptHistory, low: int, high: int, limit: int, reward_weight: float) -> np.ndarray:
    """Return the likely continuation, int32[k], k <= ``limit``, of the match ``history.suffixes[low:high]``."""
    return _choose(
        history.tokens, history.bounds, history.suffixes, history.scaled_reward, reward_weight, low, high, limit
    )


@compiled
def _choose(text, bounds, suffixes, scaled_reward, reward_weight, low, high, limit):
    draft = np.empty(max(limit, 0), dtype=np.int32)
    active = min(high - low, MAX_OCCURRENCES)
    if active <= 0 or limit <= 0:
        return draft[:0]
    positions = np.empty(active, dtype=np.int32)  # last matched position of each occurrence
    owners = np.empty(active, dtype=np.int32)  # response of each occurrence
    for i in range(active):
        positions[i] = suffixes[low + i * (high - low) // active]
        owners[i] = max(0, np.searchsorted(bounds, positions[i]) - 1)

    candidates = np.empty(active, dtype=np.int32)
    counts = np.empty(active, dtype=np.int32)
    rewards = np.empty(active, dtype=np.float64)
    newest = np.empty(active, dtype=np.int32)
    length = 0
    while length < limit:
        distinct = 0
        for i in range(active):
            token = text[positions[i] + 1]
            which = 0
            while which < distinct and candidates[which] != token:
                which += 1
            if which == distinct:
                candidates[which] = token
                counts[which] = 0
                rewards[which] = 0.0
                newest[which] = -1
                distinct += 1
            counts[which] += 1
            rewards[which] += scaled_reward[owners[i]]
            newest[which] = max(newest[which], owners[i])
        best = 0
        most = -1.0
        for which in range(distinct):
            votes = counts[which] + reward_weight * rewards[which] / counts[which]
            if votes > most or (votes == most and newest[which] > newest[best]):
                best = which
                most = votes
        token = candidates[best]
        if token < 0:  # the end of a response
            break
        draft[length] = token
        length += 1
        kept = 0
        for i in range(active):
            if text[positions[i] + 1] == token:
                positions[kept] = positions[i] + 1
                owners[kept] = owners[i]
                kept += 1
        active = kept
    return draft[:length]
