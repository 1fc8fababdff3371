"""What a step costs, and what pays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.drafting.cost import StepCost


def taught(a, b, c, noise=0.0, outliers=0.0, seed=0, steps=600):
    rng = np.random.default_rng(seed)
    cost = StepCost()
    for _ in range(steps):
        rows = int(rng.integers(1, 65))
        drafted = int(rng.integers(0, 4 * rows))
        seconds = (a + b * rows + c * drafted) * (1 + noise * rng.standard_normal())
        if rng.random() < outliers:
            seconds *= 50
        cost.observe(rows, drafted, seconds)
    return cost


@pytest.mark.parametrize("truth", [(5e-3, 1e-4, 2e-5), (1e-3, 2e-4, 2e-4), (8e-3, 0.0, 0.0)])
def test_learns_the_cost_through_noise_and_pauses(truth):
    cost = taught(*truth, noise=0.1, outliers=0.01)
    assert cost.ready
    for rows, drafted in ((1, 0), (8, 16), (64, 0), (64, 200)):
        a, b, c = truth
        assert cost.predict(rows, drafted) == pytest.approx(a + b * rows + c * drafted, rel=0.25)


def test_follows_a_change():
    cost = taught(1e-3, 1e-4, 1e-4)
    rng = np.random.default_rng(1)
    for _ in range(3000):
        rows, drafted = int(rng.integers(1, 65)), int(rng.integers(0, 100))
        cost.observe(rows, drafted, 2e-3 + 1e-5 * drafted)
    assert cost.predict(32, 50) == pytest.approx(2.5e-3, rel=0.1)


def test_grants_everything_where_verifying_is_free_and_little_where_it_is_dear():
    reach = 0.9 ** np.arange(1, 200)
    assert taught(8e-3, 1e-5, 0.0).worth(reach, 8) == len(reach)
    dear = taught(0.0, 1e-4, 1e-4)  # a draft token costs as much as a row: only a sure one would pay
    assert dear.worth(reach, 8) == 0
    some = taught(4e-3, 1e-4, 1e-4)
    assert 0 < some.worth(reach, 8) < 60


def test_says_nothing_before_it_has_seen_enough():
    cost = StepCost()
    reach = np.array([0.5, 0.1])
    assert cost.worth(reach, 4) == 2
    for _ in range(500):
        cost.observe(4, 0, 1e-3)
    assert not cost.ready, "drafted tokens never varied"
    assert cost.worth(reach, 4) == 2
    for bad in ((0, 3, 1.0), (4, 3, float("nan")), (4, 3, 0.0), (4, 3, -1.0)):
        cost.observe(*bad)
    assert not cost.ready


@settings(max_examples=100, deadline=None)
@given(
    st.floats(0, 1e-2),
    st.floats(1e-6, 1e-3),
    st.floats(0, 1e-3),
    st.integers(1, 128),
    st.lists(st.floats(0, 1), max_size=60),
)
def test_is_never_expected_to_be_slower_than_no_draft(a, b, c, rows, probabilities):
    cost = taught(a, b, c)
    reach = np.sort(probabilities)[::-1]
    k = cost.worth(reach, rows)
    if not cost.ready:
        return
    rates = [(rows + reach[:n].sum()) / cost.predict(rows, n) for n in range(len(reach) + 1)]
    assert rates[k] == pytest.approx(max(rates))
    assert rates[k] >= rates[0] * (1 - 1e-9)
