"""Calibration of scores to lengths."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from verl_rhyme.lengths.calibration import Calibration
from verl_rhyme.lengths.pairs import Pairs

#: Log lengths are linear in the scores; the order of prompts and their numbers of responses do not matter.
SCORES = np.array([3.0, 1.0, 2.0])
KNOWN = Pairs.from_rows([([1], [400, 400]), ([2], [100]), ([3], [200] * 5)])


def test_calibration_has_the_scale_of_the_lengths() -> None:
    made = Calibration.fit(SCORES, KNOWN)
    at = np.array([1.0, 1.5, 3.0, 4.0])
    np.testing.assert_allclose(np.exp(made.location(at)), [100, 141.42, 400, 800], rtol=1e-3)
    again = Calibration.from_state(asdict(made))
    np.testing.assert_array_equal(again.location(at), made.location(at))
    steps = {"scores": [1.0, 2.0, 3.0], "locations": np.log([100, 200, 400]).tolist(), "residuals": [], "slope": 0.7}
    np.testing.assert_allclose(Calibration.from_state(steps).location(at), made.location(at))


@pytest.mark.parametrize("scores", [-SCORES, np.ones(3)])
def test_scores_without_information_give_the_mean(scores) -> None:
    made = Calibration.fit(scores, KNOWN)
    assert made.slope == 0
    assert made.location(scores)[0] == pytest.approx(np.log([400] * 2 + [100] + [200] * 5).mean())


def test_an_invalid_calibration_is_rejected() -> None:
    state = asdict(Calibration.fit(SCORES, KNOWN))
    with pytest.raises(ValueError, match="no calibration"):
        Calibration.from_state({})
    with pytest.raises(ValueError, match="finite"):
        Calibration.from_state({**state, "slope": float("nan")})
