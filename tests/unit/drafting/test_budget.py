"""Which draft tokens a batch verifies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.drafting.budget import grant, least, tail_weights
from verl_rhyme.drafting.cost import EXPLORE_EVERY, StepCost
from verl_rhyme.lengths.earlier import EarlierLengths

FREE, DEAR = (8e-3, 1e-5, 0.0, 0.0), (1e-9, 1e-4, 1e-4, 0.0)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_keeps_the_likeliest_tokens_within_the_budget(data):
    rows = data.draw(st.lists(st.lists(st.floats(0.01, 1.0), max_size=6), min_size=1, max_size=6))
    budget = data.draw(st.integers(-1, 30))
    reach = np.zeros((len(rows), 6))
    for i, row in enumerate(rows):
        reach[i, : len(row)] = np.cumprod(row)
    planned = np.array([len(row) for row in rows])
    granted = grant(reach, planned, budget)
    assert granted.sum() == min(max(0, budget), planned.sum())
    assert (granted <= planned).all()
    kept = [reach[i, j] for i in range(len(rows)) for j in range(granted[i])]
    cut = [reach[i, j] for i in range(len(rows)) for j in range(granted[i], planned[i])]
    assert not kept or not cut or min(kept) >= max(cut)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_is_worth_less_than_the_least_is_never_granted(data):
    """So it need not be planned: the grants are the same without it."""
    rows = data.draw(st.lists(st.lists(st.floats(0.01, 1.0), max_size=6), min_size=1, max_size=6))
    cost = tuple(data.draw(st.tuples(*[st.floats(0, 1e-2)] * 4)))
    weights = np.array(data.draw(st.lists(st.floats(0.5, 2), min_size=len(rows), max_size=len(rows))))
    reach = np.zeros((len(rows), 6))
    for i, row in enumerate(rows):
        reach[i, : len(row)] = np.cumprod(row)
    planned = np.array([len(row) for row in rows])
    kept = np.minimum(planned, (reach * weights[:, None] >= least(cost, len(rows))).sum(1))
    assert grant(reach, kept, 20, cost, weights).tolist() == grant(reach, planned, 20, cost, weights).tolist()


def spread(values, rows):
    """A batch of ``rows`` whose tokens have these values: one token a row as far as they go, or all in the first."""
    reach = np.zeros((rows, len(values)))
    reach[0] = values
    planned = np.zeros(rows, dtype=np.int64)
    planned[0] = len(values)
    return reach, planned


def test_everything_where_verifying_is_free_and_little_where_it_is_dear():
    reach, planned = spread(0.9 ** np.arange(1, 200), 8)
    assert grant(reach, planned, 1000, FREE).sum() == 199
    assert grant(reach, planned, 1000, DEAR).sum() == 0, (
        "a draft token costs as much as a row: only a sure one would pay"
    )
    assert 0 < grant(reach, planned, 1000, (4e-3, 1e-4, 1e-4, 0.0)).sum() < 60
    assert grant(reach, planned, 7, FREE).sum() == 7
    assert grant(reach, planned, 1000, (8e-3, 1e-5, 0.0, 1e-1)).sum() == 0, "what drafting costs at all is too much"


@settings(max_examples=100, deadline=None)
@given(
    st.floats(1e-9, 1e-2),
    st.floats(1e-6, 1e-3),
    st.floats(0, 1e-3),
    st.floats(0, 1e-2),
    st.integers(1, 128),
    st.lists(st.floats(0, 1), min_size=1, max_size=60),
)
def test_is_never_expected_to_be_slower_than_no_draft(a, b, c, drafting, rows, probabilities):
    values = np.sort(probabilities)[::-1]
    reach, planned = spread(values, rows)
    k = int(grant(reach, planned, 1000, (a, b, c, drafting)).sum())
    rates = [(rows + values[:n].sum()) / (a + b * rows + c * n + drafting * (n > 0)) for n in range(len(values) + 1)]
    assert rates[k] == pytest.approx(max(rates))
    assert rates[k] >= rates[0] * (1 - 1e-9)


def weights_of(past, generated, most):
    """The weights of requests whose prompts had responses of these lengths."""
    earlier = EarlierLengths(len(past))
    for row, lengths in enumerate(past):
        earlier.set(row, lengths)
    return tail_weights(earlier.remaining(np.arange(len(past)), np.array(generated)), most)


@pytest.mark.parametrize("cost", [(0.0, 0.0, 1e-3, 0.0), (0.0, 0.0, 0.0, 1e-3), (0.0, 0.0, 1e-3, 1e-3), (0.0,) * 4])
def test_where_all_steps_drafted_one_without_drafts_is_taken(cost):
    """A fit to steps that all drafted may leave nothing to one without; its cost is learnt by taking it."""
    reach = np.full((3, 4), 0.9)
    assert grant(reach, np.full(3, 4), 100, cost).tolist() == [0, 0, 0]


def test_the_request_that_will_finish_last_is_served_first():
    reach = np.tile(0.5 ** np.arange(1, 5), (3, 1))
    planned = np.full(3, 4)
    past, generated = [[100, 110], [400, 440], []], [50, 50, 50]
    weights = weights_of(past, generated, 2.0)
    assert weights[2] == 1, "nothing is known of it"
    assert 0.5 <= weights[0] < 1 < weights[1] <= 2
    granted = grant(reach, planned, 4, weights=weights)
    assert granted[1] > granted[2] >= granted[0]
    assert (weights_of(past, generated, 1.0) == 1).all()


def test_a_request_longer_than_any_before_it_is_expected_to_go_on():
    weights = weights_of([[100], [100]], [300, 95], 2.0)
    assert weights[0] > weights[1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60)), min_size=1, max_size=20), st.floats(1, 10))
def test_weights_stay_in_their_bounds(requests, most):
    past = [[length] * (length % 4) for length, _ in requests]
    weights = weights_of(past, [generated for _, generated in requests], most)
    assert np.isfinite(weights).all()
    assert (weights >= 1 / most - 1e-12).all()
    assert (weights <= most + 1e-12).all()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 90), max_size=5), st.integers(0, 100)), min_size=1, max_size=20),
    st.floats(1, 10),
)
def test_weights_are_what_is_left_over_the_mean_of_it(requests, most):
    left = []
    for lengths, generated in requests:
        excess = [length - generated for length in lengths if length > generated]
        left.append((sum(excess) / len(excess) if excess else generated / 2) if lengths else None)
    known = [one for one in left if one is not None]
    weights = weights_of([lengths for lengths, _ in requests], [generated for _, generated in requests], most)
    if not sum(known):
        assert (weights == 1).all()
        return
    expected = [1 if one is None else min(max(one * len(known) / sum(known), 1 / most), most) for one in left]
    assert weights == pytest.approx(expected)


@pytest.mark.parametrize("sizes", [(8, 160), (60, 100), (76, 84)])
def test_batches_that_cross_the_size_where_drafting_stops_to_pay_lose_nothing(sizes):
    """vllm 49548: a threshold that batches cross cost far more than drafting gains. Here each size has what pays."""
    a, b, c, d = truth = (0.010, 2e-5, 1.2e-4, 2e-3)  # 8 rows gain half by drafting, 76 nothing
    rng, cost = np.random.default_rng(0), StepCost()
    emitted, seconds = dict.fromkeys(sizes, 0.0), dict.fromkeys(sizes, 0.0)
    for step in range(1200):
        rows = sizes[step % 2]
        reach, planned = np.cumprod(np.full((rows, 8), 0.6), axis=1), np.full(rows, 8)
        granted = grant(reach, planned, 1 << 20, cost.coefficients if cost.ready else None)
        if step % EXPLORE_EVERY == 0:
            granted = np.minimum(planned, 1)
        drafted = int(granted.sum())
        took = a + b * rows + c * drafted + d * (drafted > 0)
        cost.observe(rows, drafted, took * rng.lognormal(0, 0.05))
        if step >= 200:
            emitted[rows] += rows + sum(float(reach[row, :n].sum()) for row, n in enumerate(granted))
            seconds[rows] += took
    for rows in sizes:
        undrafted = rows / (a + b * rows)
        best = grant(np.cumprod(np.full((rows, 8), 0.6), axis=1), np.full(rows, 8), 1 << 20, truth).sum()
        gained = emitted[rows] / seconds[rows] / undrafted
        assert gained > (1.3 if best else 0.98)
