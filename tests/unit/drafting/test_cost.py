"""Cost of a step."""

import numpy as np
import pytest

from verl_rhyme.drafting.cost import StepCost


def seconds(coefficients, rows, drafted):
    a, b, c, d = coefficients
    return a + b * rows + c * drafted + d * (drafted > 0)


def predicted(cost, rows, drafted):
    return seconds(cost.coefficients, rows, drafted)


def taught(a, b, c, d=0.0, noise=0.0, outliers=0.0, seed=0, steps=600):
    rng = np.random.default_rng(seed)
    cost = StepCost()
    for _ in range(steps):
        rows = int(rng.integers(1, 65))
        drafted = int(rng.integers(0, 4 * rows)) if rng.random() < 0.9 else 0
        took = seconds((a, b, c, d), rows, drafted) * (1 + noise * rng.standard_normal())
        if rng.random() < outliers:
            took *= 50
        cost.observe(rows, drafted, took)
    return cost


@pytest.mark.parametrize("truth", [(5e-3, 1e-4, 2e-5, 0.0), (1e-3, 2e-4, 2e-4, 1e-3), (8e-3, 0.0, 0.0, 0.0)])
def test_learns_the_cost_through_noise_and_pauses(truth):
    cost = taught(*truth, noise=0.1, outliers=0.01)
    assert cost.ready
    for rows, drafted in ((1, 0), (8, 16), (64, 0), (64, 200)):
        assert predicted(cost, rows, drafted) == pytest.approx(seconds(truth, rows, drafted), rel=0.25)


def test_follows_a_change():
    cost = taught(1e-3, 1e-4, 1e-4)
    rng = np.random.default_rng(1)
    for _ in range(3000):
        rows, drafted = int(rng.integers(1, 65)), int(rng.integers(0, 100))
        cost.observe(rows, drafted, 2e-3 + 1e-5 * drafted)
    assert predicted(cost, 32, 50) == pytest.approx(2.5e-3, rel=0.1)


def test_is_not_ready_before_enough_observations():
    cost = StepCost()
    for _ in range(500):
        cost.observe(4, 0, 1e-3)
    assert not cost.ready, "drafted tokens never varied"
    for bad in ((0, 3, 1.0), (4, 3, float("nan")), (4, 3, 0.0), (4, 3, -1.0)):
        cost.observe(*bad)
    assert not cost.ready


def test_step_without_drafts_looks_cheap_until_observed():
    """It is therefore tried, and then measured."""
    rng = np.random.default_rng(2)
    cost = StepCost()
    for _ in range(400):
        rows, drafted = int(rng.integers(1, 33)), int(rng.integers(1, 100))
        cost.observe(rows, drafted, 4e-3 + 1e-4 * rows + 2e-5 * drafted + 1e-3)
    assert predicted(cost, 16, 50) == pytest.approx(7.6e-3, rel=0.02)
    assert predicted(cost, 16, 0) < 5.6e-3, "the observed steps do not determine the cost of one without drafts"
    for _ in range(32):
        cost.observe(16, 0, 5.6e-3)
    assert predicted(cost, 16, 0) == pytest.approx(5.6e-3, rel=0.02)
    assert predicted(cost, 16, 50) == pytest.approx(7.6e-3, rel=0.02)
