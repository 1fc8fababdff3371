"""Selection of the draft tokens that a batch verifies."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.drafting.budget import FREE, Rest, Waiting, lowest_profitable, select_tokens
from verl_rhyme.planning.experts import Experts

CHEAP, DEAR = (8e-3, 1e-5, 0.0, 0.0), (1e-9, 1e-4, 1e-4, 0.0)


def priced(rows, cost, most=400):
    """Return the prices of a step by seconds of a step, of a row, of a draft token, and of drafting at all."""
    a, b, c, d = cost
    drafted = np.arange(most + 1)
    return a + b * rows + c * drafted + d * (drafted > 0)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_keeps_the_likeliest_tokens_within_the_budget(data):
    rows = data.draw(st.lists(st.lists(st.floats(0.01, 1.0), max_size=6), min_size=1, max_size=6))
    budget = data.draw(st.integers(-1, 30))
    reach = np.zeros((len(rows), 6))
    for i, row in enumerate(rows):
        reach[i, : len(row)] = np.cumprod(row)
    planned = np.array([len(row) for row in rows])
    granted = select_tokens(reach, planned, budget, FREE)
    assert granted.sum() == min(max(0, budget), planned.sum())
    assert (granted <= planned).all()
    kept = [reach[i, j] for i in range(len(rows)) for j in range(granted[i])]
    cut = [reach[i, j] for i in range(len(rows)) for j in range(granted[i], planned[i])]
    assert not kept or not cut or min(kept) >= max(cut)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_token_below_the_lower_bound_is_never_granted(data):
    """Such tokens need not be planned: the grants are the same without them."""
    rows = data.draw(st.lists(st.lists(st.floats(0.01, 1.0), max_size=6), min_size=1, max_size=6))
    cost = tuple(data.draw(st.tuples(*[st.floats(0, 1e-2)] * 4)))
    reach = np.zeros((len(rows), 6))
    for i, row in enumerate(rows):
        reach[i, : len(row)] = np.cumprod(row)
    planned = np.array([len(row) for row in rows])
    loaded = Experts(128, 8).loaded(len(rows) + np.arange(41))
    prices = priced(len(rows), cost, 40) + data.draw(st.sampled_from([0.0, 1e-5, 1e-4])) * loaded
    kept = np.minimum(planned, (reach >= lowest_profitable(prices, len(rows))).sum(1))
    assert select_tokens(reach, kept, 20, prices).tolist() == select_tokens(reach, planned, 20, prices).tolist()


def spread(values, rows):
    """Return a batch of ``rows`` with these token values, either one token a row or all in the first row."""
    reach = np.zeros((rows, len(values)))
    reach[0] = values
    planned = np.zeros(rows, dtype=np.int64)
    planned[0] = len(values)
    return reach, planned


@settings(max_examples=100, deadline=None)
@given(
    st.floats(1e-9, 1e-2),
    st.floats(1e-6, 1e-3),
    st.floats(0, 1e-3),
    st.floats(0, 1e-2),
    st.integers(1, 128),
    st.lists(st.floats(0, 1), min_size=1, max_size=60),
)
def test_expected_rate_is_never_below_that_without_drafts(a, b, c, drafting, rows, probabilities):
    values = np.sort(probabilities)[::-1]
    reach, planned = spread(values, rows)
    k = int(select_tokens(reach, planned, 1000, priced(rows, (a, b, c, drafting))).sum())
    rates = [(rows + values[:n].sum()) / (a + b * rows + c * n + drafting * (n > 0)) for n in range(len(values) + 1)]
    assert rates[k] == pytest.approx(max(rates))
    assert rates[k] >= rates[0] * (1 - 1e-9)


@pytest.mark.parametrize("cost", [(0.0, 0.0, 1e-3, 0.0), (0.0, 0.0, 0.0, 1e-3), (0.0, 0.0, 1e-3, 1e-3), (0.0,) * 4])
def test_step_without_drafts_is_tried_if_it_seems_to_cost_nothing(cost):
    """A fit to steps that all drafted may give a step without drafts no price; trying one measures it."""
    reach = np.full((3, 4), 0.9)
    assert select_tokens(reach, np.full(3, 4), 100, priced(3, cost)).tolist() == [0, 0, 0]


def plans(rest, rows, steps, gain, planning=2e-3, seconds=1e-2):
    """Return which of the steps are planned; each plan gains ``gain`` seconds."""
    planned = [False]
    for _ in range(steps):
        planned.append(rest.plans(rows))
        rest.observe(rows, planned[-1], planning * planned[-1], gain * planned[-1], seconds)
    return np.array(planned[1:])


def test_rests_while_plans_take_more_than_they_gain():
    rest = Rest()
    planned = plans(rest, 128, 1000, gain=1e-3)
    assert planned[:4].all()
    assert 0 < planned[8:].mean() < 0.03
    planned = plans(rest, 128, 200, gain=3e-3)
    assert planned[Rest.SELDOM + 1 :].all(), "the text repeats now"
    assert plans(rest, 128, 200, gain=1e-3)[64:].mean() < 0.1


def test_rests_by_width_and_never_for_a_negligible_plan():
    rest = Rest()
    plans(rest, 200, 100, gain=0.0)
    assert plans(rest, 4, 100, gain=5e-3).all()
    assert plans(Rest(), 4, 200, gain=0.0, planning=2e-5).all()


def test_a_pause_at_the_first_plan_of_a_width_counts_as_a_step():
    """As when a kernel compiles: else the width would rest for thousands of steps."""
    rest = Rest()
    rest.observe(16, True, 3.0, 5e-3, 1e-2)
    assert plans(rest, 16, 400, gain=5e-3)[200:].all()


def test_steps_wait_while_drafts_gain_more_than_waits_cost():
    waiting = Waiting()
    assert not waiting.observe(0.0, 0.4), "nothing to wait for"
    assert [waiting.observe(0.5, 0.4) for _ in range(8)][-1]
    assert not [waiting.observe(0.0, 0.0) for _ in range(200)][-1], "a wait costs a little where none was measured"
    few = [waiting.observe(0.5 if step % 8 == 0 else 0.0, 0.02) for step in range(200)]
    assert all(few[100:]), "a gain in every eighth step is more than eight cheap waits"
    assert not any([waiting.observe(0.5 if step % 8 == 0 else 0.0, 0.4) for step in range(200)][108::8])
