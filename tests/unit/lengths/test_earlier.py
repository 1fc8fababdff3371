"""Remaining tokens of a response, compared with the definition computed directly."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.lengths.earlier import LATEST, EarlierLengths


def directly(lengths, emitted):
    lengths = lengths[-LATEST:]
    if not lengths:
        return math.nan
    excess = [length - emitted for length in lengths if length > emitted]
    return sum(excess) / len(excess) if excess else emitted / 2


@settings(max_examples=200)
@given(st.data())
def test_agrees_with_the_definition_on_every_row(data):
    """Rows filled, filled again and emptied; asked in any order, some twice."""
    earlier, known = EarlierLengths(3), [[], [], []]
    response = st.lists(st.integers(0, 50) | st.integers(0, 131_072), max_size=LATEST + 9)
    for lengths in data.draw(st.lists(response, max_size=8)):
        row = data.draw(st.integers(0, len(known) - 1))
        earlier.set(row, np.array(lengths, dtype=np.int32))
        known[row] = lengths
    assert len(earlier) == len(known)
    ask = st.tuples(st.integers(0, len(known) - 1), st.integers(0, 60) | st.integers(0, 140_000))
    asked = data.draw(st.lists(ask, max_size=12))
    rows, emitted = np.array(asked, dtype=np.int64).reshape(-1, 2).T
    expected = [directly(known[row], done) for row, done in asked]
    np.testing.assert_array_equal(earlier.remaining(rows, emitted), expected)  # to the last bit; NaN equals NaN
    np.testing.assert_array_equal(earlier.remaining(rows.astype(np.int32), emitted), expected)


def test_before_it_starts_a_response_is_as_long_as_the_mean_one():
    earlier = EarlierLengths(2)
    earlier.set(0, [100, 300, 200])
    mean, unknown = earlier.remaining(np.array([0, 1]), np.array([0, 0]))
    assert mean == 200
    assert np.isnan(unknown)


def test_only_the_latest_responses_count():
    earlier = EarlierLengths(1)
    earlier.set(0, [9_000] * 50 + [100] * LATEST)
    assert earlier.remaining(np.array([0]), np.array([0])) == 100


def test_the_callers_array_is_not_changed():
    lengths = np.array([3, 1, 2], dtype=np.int32)
    EarlierLengths(1).set(0, lengths)
    assert lengths.tolist() == [3, 1, 2]


def test_an_unknown_row_is_an_error():
    earlier = EarlierLengths(2)
    with pytest.raises(IndexError):
        earlier.set(2, [1])
    with pytest.raises(IndexError):
        earlier.remaining(np.array([0, 2]), np.array([0, 0]))
