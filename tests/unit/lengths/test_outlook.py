"""What responses may yet add, cell by cell."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.lengths.outlook import CELLS, certain, edges
from verl_rhyme.lengths.predictor import LengthPredictor

LIMIT = 8000


@pytest.fixture(scope="module")
def predictor():
    """Of three visits of prompts of all lengths."""
    found, rng = LengthPredictor(LIMIT), np.random.default_rng(3)
    for _ in range(3):
        for n in range(200):
            for tokens in rng.lognormal(5 + 3 * n / 200, 0.5, 8).astype(int):
                found.ended(n, min(int(tokens), LIMIT))
            found.close(n)
    return found


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 199), st.integers(0, LIMIT - 1)), min_size=1, max_size=20))
def test_its_sum_is_what_is_expected_to_be_added(predictor, asked):
    forecast = predictor.forecast([n for n, _ in asked], np.array([emitted for _, emitted in asked]))
    outlook = forecast.outlook()
    assert outlook.beyond.shape == (len(asked), CELLS)
    assert (np.diff(outlook.beyond, axis=1) <= 1e-6).all(), "who adds more has added less before"
    assert ((outlook.beyond >= 0) & (outlook.beyond <= 1)).all()
    added = outlook.beyond @ np.diff(edges(LIMIT))
    expected = forecast.mean() - forecast.emitted
    cell = np.diff(edges(LIMIT))[np.searchsorted(edges(LIMIT), np.minimum(expected, LIMIT - 1), side="right") - 1]
    assert (np.abs(added - expected) <= 0.1 * expected + cell).all(), "to within a cell"
    left = LIMIT - forecast.emitted
    assert (outlook.beyond[edges(LIMIT)[:-1][None] >= left[:, None]] == 0).all(), "nothing goes beyond the limit"


@given(st.lists(st.tuples(st.integers(1, LIMIT), st.integers(0, LIMIT)), min_size=1, max_size=20))
def test_of_known_lengths_it_is_exact(known):
    tokens, emitted = (np.array(column) for column in zip(*known, strict=True))
    outlook = certain(tokens, emitted, LIMIT)
    assert outlook.beyond @ np.diff(edges(LIMIT)) == pytest.approx(np.maximum(tokens - emitted, 0), rel=1e-4, abs=1e-2)
    assert outlook.expected.tolist() == outlook.p90.tolist() == tokens.tolist()


def test_siblings_that_ended_count_as_if_they_had_been_told():
    told, passed = LengthPredictor(LIMIT), LengthPredictor(LIMIT)
    for tokens in (3000, 3300, 2800):
        told.ended("a", tokens)
    there = told.forecast(["a", "b"])
    here = passed.forecast(["a", "b"], 0, {"a": [3000, 3300, 2800]})
    assert here.mean() == pytest.approx(there.mean())
    assert here.seen.tolist() == [True, False]
    assert here.mean()[0] > 1.2 * passed.forecast(["a"]).mean()[0], "which are not kept"
