"""Calibration of scores to lengths."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.lengths.worlds import pairs
from verl_rhyme.lengths.calibration import Calibration
from verl_rhyme.lengths.pairs import Pairs


@given(st.integers(0, 1000), st.integers(2, 60))
@settings(max_examples=40, deadline=None)  # the first example imports scipy
def test_calibration_never_reverses_the_order(seed, count) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal(count)
    known = Pairs.from_rows(([i], np.exp(rng.normal(4 + s, 1, 3)).astype(int)) for i, s in enumerate(scores))
    made = Calibration.fit(scores, known)
    at = np.sort(rng.standard_normal(50))
    assert np.isfinite(made.location(at)).all()
    assert (np.diff(made.location(at)) >= -1e-9).all()
    beyond = scores.max() + np.arange(1.0, 4.0)
    if np.corrcoef(scores, known.locations)[0, 1] > 0.1:
        assert (np.diff(made.location(beyond)) > 0).all(), "the longest have different lengths"
    again = Calibration.from_state(json.loads(json.dumps(made.state_dict())))
    np.testing.assert_array_equal(again.location(at), made.location(at))


def test_calibration_has_the_scale_of_the_lengths() -> None:
    """The order of prompts and their numbers of responses do not matter."""
    scores = np.array([3.0, 1.0, 2.0])
    known = Pairs.from_rows([([1], [400, 400]), ([2], [100]), ([3], [200] * 5)])
    made = Calibration.fit(scores, known)
    np.testing.assert_allclose(
        np.exp(made.location(np.array([1.0, 1.5, 3.0, 4.0]))), [100, 141.42, 400, 800], rtol=1e-3
    )


def test_an_invalid_calibration_is_rejected() -> None:
    state = Calibration.fit(np.arange(8.0), pairs(8)).state_dict()
    for name, value in (("scores", [1.0]), ("locations", [float("nan")] * len(state["scores"]))):
        with pytest.raises(ValueError, match=r"incomplete|finite"):
            Calibration.from_state({**state, name: value})
    with pytest.raises(ValueError, match="no calibration"):
        Calibration.from_state({})
    with pytest.raises(ValueError, match="slope"):
        Calibration.from_state({**state, "slope": -1.0})
