"""Price of a step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.drafting.cost import StepCost
from verl_rhyme.planning.experts import Experts


def linear(a, b, c, d=0.0):
    return lambda rows, drafted, prefilled=0: a + b * rows + c * (drafted + prefilled) + d * (drafted > 0)


def knee(rows, drafted, prefilled=0):
    return 0.012 * max(1.0, (rows + drafted + prefilled) / 96)


def price(cost, rows, drafted):
    return cost.prices(rows, drafted)[drafted]


def teach(cost, truth, rows, steps, noise=0.02, outliers=0.0, prefilled=lambda rng: 0, most=4, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        width = int(rng.integers(rows[0], rows[1] + 1))
        drafted, prompt = int(rng.integers(0, most * width + 1)) * int(rng.random() < 0.8), prefilled(rng)
        seconds = truth(width, drafted, prompt) * np.exp(noise * rng.standard_normal())
        cost.observe(width, drafted, seconds * (50 if rng.random() < outliers else 1), prompt)
    return cost


@pytest.mark.parametrize("truth", [(5e-3, 1e-4, 2e-5), (1e-3, 2e-4, 2e-4, 1e-3), (8e-3, 0.0, 0.0), (0.0, 6e-3, 6e-3)])
def test_learns_lines_through_noise_and_pauses(truth):
    cost = teach(StepCost(), linear(*truth), (1, 64), 1500, noise=0.1, outliers=0.01)
    for rows, drafted in ((1, 0), (8, 16), (64, 0), (64, 200)):
        assert price(cost, rows, drafted) == pytest.approx(linear(*truth)(rows, drafted), rel=0.25)


def test_learns_the_knee_of_each_width():
    """One line for all widths undercuts the price of a draft token beyond the knee by half."""
    cost = teach(StepCost(), knee, (1, 64), 1500)
    for rows, drafted in ((2, 8), (8, 16), (8, 80), (40, 40), (40, 120), (64, 0), (64, 64), (64, 192)):
        if drafted <= 4 * rows:
            assert price(cost, rows, drafted) == pytest.approx(knee(rows, drafted), rel=0.1)


@pytest.mark.parametrize(("count", "chosen"), [(128, 8), (32, 4)])
def test_learns_the_concave_price_of_a_mixture(count, chosen):
    """Beyond the steps that were seen, too, where lines are far off; a prompt loads experts as well."""
    experts = Experts(count, chosen)

    def truth(rows, drafted, prefilled=0):
        tokens = rows + drafted + prefilled
        return 0.003 + 0.01 * experts.loaded(tokens) / count + 2e-5 * tokens

    steps = {"rows": (1, 8), "steps": 300, "prefilled": lambda rng: 200 * int(rng.random() < 0.1), "most": 2}
    cost, lines = (teach(StepCost(experts=each), truth, **steps) for each in (experts, None))
    for rows, drafted in ((1, 0), (1, 2), (4, 4), (8, 0), (8, 16), (8, 64)):
        assert price(cost, rows, drafted) == pytest.approx(truth(rows, drafted), rel=0.07)
    assert price(lines, 8, 64) > 1.5 * truth(8, 64)


def test_narrow_batches_do_not_change_the_price_of_wide_ones():
    """Thousands of steps of a rollout's tail show that drafts cost nothing, but for four rows."""
    cost = teach(StepCost(), knee, (60, 64), 40)
    teach(cost, knee, (1, 4), 5000, most=8)
    assert price(cost, 64, 128) == pytest.approx(knee(64, 128), rel=0.1)
    assert price(cost, 4, 16) == pytest.approx(knee(4, 16), rel=0.05)


def test_neighbouring_widths_share_what_they_know():
    cost = teach(StepCost(), knee, (33, 63), 200)
    for rows in (24, 64):
        assert price(cost, rows, 96) == pytest.approx(knee(rows, 96), rel=0.15), "this width was never seen"


def test_unknown_sizes_are_taken_in_small_steps():
    cost = teach(StepCost(), knee, (1, 4), 500, most=6)
    assert cost.room(64) == 16
    cost.observe(64, 16, knee(64, 16))
    assert cost.room(64) == 32


def test_nothing_is_known_before_a_step():
    cost = StepCost()
    for bad in ((0, 3, 1.0), (4, 3, float("nan")), (4, 3, 0.0), (4, 3, -1.0)):
        cost.observe(*bad)
    assert not cost.ready
    cost.observe(4, 0, 1e-3)
    assert cost.ready


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 600), st.floats(1e-5, 10.0)), min_size=1, max_size=40),
    st.sampled_from([None, Experts(128, 8)]),
)
def test_price_is_positive_and_without_experts_convex_whatever_was_observed(steps, experts):
    cost = StepCost(experts=experts)
    for rows, drafted, seconds in steps:
        cost.observe(rows, drafted, seconds)
    for rows in (1, 7, 64, 300):
        prices = cost.prices(rows, 500)
        assert np.isfinite(prices).all()
        assert (prices >= 0).all()
        slopes = np.diff(prices[1:])
        assert (slopes >= -1e-12 * prices[-1]).all()
        assert experts or (np.diff(slopes) >= -1e-9 * prices[-1]).all()


def test_a_long_run_follows_a_change_as_soon_as_a_short_one():
    """As from one rollout to the next: contexts begin short again."""
    cost = StepCost()
    for _ in range(30_000):
        cost.observe(16, 0, 0.04)
        cost.prices(16, 0)
    for _ in range(1_500):
        cost.observe(16, 0, 0.01)
        cost.prices(16, 0)
    assert cost.prices(16, 0)[0] < 0.015
