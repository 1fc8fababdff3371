"""State of the adaptive drafter for its compiled core: tuples of arrays, changed in place.

Sizes in capitals are constants of :mod:`verl_rhyme.drafting.kernels`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class LiveArrays(NamedTuple):
    """Arrays of :class:`verl_rhyme.drafting.live_texts.LiveTexts`. A position is ``block * BLOCK + offset``."""

    text: np.ndarray  # int32[blocks * BLOCK]
    link_group: np.ndarray  # int32[blocks * BLOCK], earlier position with the same token in the same group, or -1
    head_group: np.ndarray  # int32[2**k], latest position by hash
    counts: np.ndarray  # int64[2**k], context's mark (23 bits), count (8) and next token (32), by buckets of WAYS
    fill: np.ndarray  # int32[blocks], tokens in the block
    before: np.ndarray  # int32[blocks], previous block of the same text, or -1
    after: np.ndarray  # int32[blocks], next block of the same text, or -1
    owner: np.ndarray  # int64[blocks], number of the text
    group: np.ndarray  # int64[blocks], group of the text
    open: np.ndarray  # bool[blocks], whether a running request writes to the block
    cursor: np.ndarray  # int64[1], next block to take


class SlotArrays(NamedTuple):
    """One entry for each live request; see :class:`verl_rhyme.drafting.adaptive.AdaptiveDrafter`."""

    length: np.ndarray  # int64[slots], tokens taken in, prompt and response
    block: np.ndarray  # int32[slots], last block of the text, or -1
    owner: np.ndarray  # int64[slots], number of the text
    group: np.ndarray  # int64[slots]
    # Addresses of text, suffix array, confidence and table of first tokens of the prompt's history.
    history: np.ndarray  # int64[slots, 4]
    history_size: np.ndarray  # int64[slots, 3], entries of the text, of the suffix array and of the table
    recent: np.ndarray  # float64[slots], from -1 to 1, recent acceptance of first draft tokens
    # The plan of the last step, to learn from. K is the longest draft.
    planned: np.ndarray  # int32[slots], draft tokens, granted or not
    planned_at: np.ndarray  # int64[slots], length of the text at the plan
    draft: np.ndarray  # int32[slots, K]
    inputs: np.ndarray  # float32[slots, K, N_INPUTS]
    weight_set: np.ndarray  # int8[slots, K]
    bin: np.ndarray  # int8[slots, K]
    candidates: np.ndarray  # int32[slots], candidates of the first token
    candidate: np.ndarray  # int32[slots, MAX_CANDIDATES]
    candidate_inputs: np.ndarray  # float32[slots, MAX_CANDIDATES, N_INPUTS]
    source: np.ndarray  # int8[slots, K], the first source that proposed the token, see policy.SOURCES
    by_source: np.ndarray  # int32[slots, len(SOURCES) + 1, 2], verified and accepted draft tokens
    # Not read by the compiled core.
    counts: np.ndarray  # int64[slots, 3], drafted tokens, accepted tokens and verify steps
    visited: np.ndarray  # int64[slots], the step at which the slot was last planned


class Batch(NamedTuple):
    """The B rows of a step."""

    ids: np.ndarray  # int32[B], slots
    rows: np.ndarray  # int32[B], rows of the slots in ``tokens``
    tokens: np.ndarray  # int32[rows, positions], prompt and response of each request so far
    lengths: np.ndarray  # int64[B], tokens of each request
    limits: np.ndarray  # int64[B], most draft tokens of each request


class Plans(NamedTuple):
    """Planned drafts of the B rows of a step, of up to K tokens."""

    draft: np.ndarray  # int32[B, K]
    reach: np.ndarray  # float64[B, K], probability that each token is reached and accepted
    planned: np.ndarray  # int64[B], tokens of each plan


class Scratch(NamedTuple):
    """Work space of one walk: an entry for each occurrence and for each candidate."""

    position: np.ndarray  # int64[MAX_OCCURRENCES], last matched position
    source: np.ndarray  # int32[MAX_OCCURRENCES]
    match: np.ndarray  # int32[MAX_OCCURRENCES], matched tokens
    following: np.ndarray  # int64[MAX_OCCURRENCES], position of the next token
    which: np.ndarray  # int32[MAX_OCCURRENCES], candidate of the occurrence
    candidate: np.ndarray  # int32[_MAX_DISTINCT], tokens
    votes: np.ndarray  # int32[_MAX_DISTINCT, _N_VOTES]
    mass: np.ndarray  # float32[_MAX_DISTINCT, N_TIERS], sum of recorded probabilities
    known: np.ndarray  # int32[_MAX_DISTINCT, N_TIERS], number of recorded probabilities
    total: np.ndarray  # int32[_N_VOTES]
    active: np.ndarray  # int32[1 + _N_VOTES], number of nonzero entries of ``total`` plus one, then their indices
    inputs: np.ndarray  # float32[N_INPUTS]
    keys: np.ndarray  # int64[len(ORDERS)], hashes of the context's last tokens
    context: np.ndarray  # int32[MAX_MATCH + longest draft]


class Model(NamedTuple):
    """Parameters of :mod:`verl_rhyme.drafting.confidence`."""

    weights: np.ndarray  # float64[N_SETS, N_INPUTS]
    calibration: np.ndarray  # float64[N_BINS, 2], accepted and tried, both decayed


class RegrowthArrays(NamedTuple):
    """One entry for each slot; :mod:`verl_rhyme.drafting.regrowth` names the columns of ``state``."""

    previous: np.ndarray  # int64[slots], address of the previous text
    size: np.ndarray  # int64[slots], tokens of the previous text; 0 if there is none
    state: np.ndarray  # int64[slots, N_STATE]
