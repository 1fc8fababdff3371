"""Division of a step into pieces; e2e/test_two_nodes.py tests the real TransferQueue."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl_rhyme.processes import stored_samples
from verl_rhyme.processes.stored_samples import StoredSamples

SAMPLES = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 5)), max_size=30)


@given(samples=SAMPLES, limit=st.integers(1, 20_000), grouped=st.booleans())
def test_pieces_are_bounded_and_keep_prompts_together(samples, limit, grouped):
    lengths = np.array([length for length, _ in samples], dtype=np.int64)
    prompts = [prompt for _, prompt in samples]
    before, stored_samples.PIECE_BYTES = stored_samples.PIECE_BYTES, limit
    try:
        stored = StoredSamples("train", [str(row) for row in range(len(samples))], lengths)
        pieces = list(stored.pieces(4, prompts if grouped else None))
    finally:
        stored_samples.PIECE_BYTES = before
    assert sorted(row for piece in pieces for row in piece) == list(range(len(samples)))
    for piece in pieces:
        labels = {prompts[row] for row in piece}
        if grouped:
            assert not labels & {prompts[row] for other in pieces if other is not piece for row in other}
        assert 4 * lengths[piece].sum() <= limit or len(labels if grouped else piece) == 1
    for one, other in pairwise(pieces):  # no more pieces than necessary
        last = [row for row in other if not grouped or prompts[row] == prompts[other[0]]]
        first_group = last if grouped else other[:1]
        assert 4 * (lengths[one].sum() + lengths[first_group].sum()) > limit
