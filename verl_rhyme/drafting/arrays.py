"""The adaptive drafter's state as its compiled core sees it: tuples of arrays, changed in place.

Sizes in capitals are constants of :mod:`verl_rhyme.drafting.kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class LiveArrays(NamedTuple):
    """See :class:`verl_rhyme.drafting.live_texts.LiveTexts`. A position is ``block * BLOCK + offset``."""

    text: np.ndarray  # int32[blocks * BLOCK]
    link_group: np.ndarray  # int32[blocks * BLOCK], the position before with the same token in the same group, or -1
    head_group: np.ndarray  # int32[2**k], the latest position by hash
    counts: np.ndarray  # int64[2**k], context's mark (23 bits), count (8) and next token (32), by buckets of WAYS
    fill: np.ndarray  # int32[blocks], tokens in it
    before: np.ndarray  # int32[blocks], its text's block before it, or -1
    after: np.ndarray  # int32[blocks]
    owner: np.ndarray  # int64[blocks], number of its text
    group: np.ndarray  # int64[blocks]
    open: np.ndarray  # bool[blocks], a running request writes here
    cursor: np.ndarray  # int64[1], the block to take next


class SlotArrays(NamedTuple):
    """One entry for each live request; see :class:`verl_rhyme.drafting.adaptive.AdaptiveDrafter`."""

    length: np.ndarray  # int64[slots], tokens seen, prompt and response
    block: np.ndarray  # int32[slots], where its text ends, or -1
    owner: np.ndarray  # int64[slots], number of its text
    group: np.ndarray  # int64[slots]
    # Addresses of text, suffix array, confidence and table of first tokens of its prompt's history.
    history: np.ndarray  # int64[slots, 4]
    history_size: np.ndarray  # int64[slots, 3], entries of the text, of the suffix array and of the table
    recent: np.ndarray  # float64[slots], from -1 to 1, how first draft tokens fared
    # What was planned at the last step, to learn from. K is the longest draft.
    planned: np.ndarray  # int32[slots], draft tokens, granted or not
    planned_at: np.ndarray  # int64[slots], length at which it was made
    draft: np.ndarray  # int32[slots, K]
    inputs: np.ndarray  # float32[slots, K, N_INPUTS]
    weight_set: np.ndarray  # int8[slots, K]
    bin: np.ndarray  # int8[slots, K]
    candidates: np.ndarray  # int32[slots], candidates of the first token
    candidate: np.ndarray  # int32[slots, MAX_CANDIDATES]
    candidate_inputs: np.ndarray  # float32[slots, MAX_CANDIDATES, N_INPUTS]
    source: np.ndarray  # int8[slots, K], the first source that proposed the token, see policy.SOURCES
    by_source: np.ndarray  # int32[slots, len(SOURCES), 2], verified draft tokens, and accepted ones
    # Where a walk that goes position by position stands.
    walkers: np.ndarray  # int32[slots], occurrences that agree with the draft so far
    walker: np.ndarray  # int64[slots, MAX_OCCURRENCES, 3], position, source and match of each


class Scratch(NamedTuple):
    """Room for one walk: an entry for each occurrence, and one for each candidate."""

    position: np.ndarray  # int64[MAX_OCCURRENCES], of the last token agreed on
    source: np.ndarray  # int32
    match: np.ndarray  # int32, tokens agreed on
    following: np.ndarray  # int64, position of what follows
    which: np.ndarray  # int32, its candidate
    candidate: np.ndarray  # int32[_MAX_DISTINCT], tokens
    votes: np.ndarray  # int32[_MAX_DISTINCT, _N_VOTES]
    mass: np.ndarray  # float32[_MAX_DISTINCT, N_TIERS], sum of recorded probabilities
    known: np.ndarray  # int32[_MAX_DISTINCT, N_TIERS], how many were recorded
    total: np.ndarray  # int32[_N_VOTES]
    active: np.ndarray  # int32[1 + _N_VOTES], its entries that are not 0, after their number plus one
    inputs: np.ndarray  # float32[N_INPUTS]
    keys: np.ndarray  # int64[len(ORDERS)], hashes of the context's last tokens
    context: np.ndarray  # int32[MAX_MATCH + longest draft]


class Model(NamedTuple):
    """See :mod:`verl_rhyme.drafting.confidence`."""

    weights: np.ndarray  # float64[N_SETS, N_INPUTS]
    calibration: np.ndarray  # float64[N_BINS, 2], accepted and tried, both decayed


class RegrowthArrays(NamedTuple):
    """One entry for each slot; :mod:`verl_rhyme.drafting.regrowth` names the columns of ``state``."""

    previous: np.ndarray  # int64[slots], address of its previous text
    size: np.ndarray  # int64[slots], tokens of it; 0 where there is none
    state: np.ndarray  # int64[slots, N_STATE]
