"""How far lengths fall from what was forecast, after many."""

import numpy as np
import pytest
from scipy.special import log_ndtr

from verl_rhyme.lengths.residuals import Residuals


@pytest.mark.parametrize("seen", [0, 10**5, 10**8])
def test_beyond_what_came_it_goes_on_as_a_normal_however_much_came(seen):
    """Else the hazard is 0 there, and one that gets so far is expected to reach the limit."""
    residuals, rng = Residuals(), np.random.default_rng(0)
    for _ in range(min(seen // 4096, 3000)):
        residuals.add(rng.uniform(-1.5, 1.5, 4096), np.ones(4096, bool))
    at = np.array([2.0, 3.0, 4.0])
    assert np.diff(residuals.hazard(at)) == pytest.approx(np.diff(-log_ndtr(-at)), rel=0.05)
    taken = Residuals()
    taken.load_state_dict(residuals.state_dict())
    assert taken.hazard(at).tolist() == residuals.hazard(at).tolist()


def test_what_came_outweighs_the_normal():
    residuals, rng = Residuals(), np.random.default_rng(0)
    residuals.add(rng.exponential(1.0, 8192), np.ones(8192, bool))
    assert residuals.hazard(np.array([2.0])) - residuals.hazard(np.array([1.0])) == pytest.approx(1.0, rel=0.1)
