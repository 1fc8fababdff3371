"""The elastic rule: it fires as responses grow, reverses as they shrink, and does neither by chance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.planning.cost import ReplicaCost, StepCost
from verl_rhyme.planning.elastic import Elastic, Limits
from verl_rhyme.planning.times import Work, rollout

COST = ReplicaCost(StepCost(base=5e-3, row=1e-4, cached=3e-8), slots=128)


def run(elastic, seconds, trained, steps, noise=0.0, rng=None):
    """Return the units by step, where generation takes ``seconds(units, step)`` and advice is followed."""
    units = []
    for step in range(steps):
        shake = 1 + (noise * (2 * rng.random(2) - 1) if rng is not None else np.zeros(2))
        advice = elastic.observe(seconds(elastic.units, step) * shake[0], trained(step) * shake[1])
        elastic.set_units(elastic.units + advice.change)
        units.append(elastic.units)
    return units


def test_as_published_one_unit_is_added_when_generation_stays_behind():
    eager = Limits(window=1, cooldown=0, margin=0)
    elastic = Elastic(lambda k: 120 / k, 4, eager)
    assert elastic.observe(30, 24.1).change == 0  # 5.9 behind, and a unit saves 6
    advice = elastic.observe(30, 24.0)
    assert (advice.change, advice.delta, advice.saving) == (1, 6, pytest.approx(6))
    assert elastic.units == 4  # advice, until it is done


def test_one_unit_is_removed_when_generation_stays_ahead():
    elastic = Elastic(lambda k: 120 / k, 5, Limits(window=1, cooldown=0, margin=0))
    assert elastic.observe(24, 29.9).change == 0
    assert elastic.observe(24, 30.0).change == -1


def test_growing_lengths_add_units_and_shrinking_lengths_remove_them():
    """StreamRL's figure 11: lengths double over some steps; here they come back, too. Training grows with the lengths,
    but less than generation: its batch has a part that does not."""

    def lengths(step):
        return 2000 * (1 + min(step, 60 - step, 20) / 20)

    def seconds(units, step):
        work = Work(np.full(100, lengths(step)), 4096)
        return float(rollout(COST, units, work))

    now = [0]
    elastic = Elastic(lambda k: seconds(k, now[0]), 4, Limits(window=2, cooldown=1, most=32))
    base = seconds(4, 0)
    units = []
    for step in range(80):
        now[0] = min(step, 60)
        advice = elastic.observe(seconds(elastic.units, now[0]), base * (0.75 + 0.25 * lengths(now[0]) / 2000))
        elastic.set_units(elastic.units + advice.change)
        units.append(elastic.units)
    assert max(units) > 4
    assert units[-1] <= 5
    peak = units.index(max(units))
    assert units[:peak] == sorted(units[:peak])
    assert units[peak + 20 :] == sorted(units[peak + 20 :], reverse=True)


def test_no_unit_is_added_where_the_longest_responses_bound_the_step():
    """By the published rule, any delta is at least a saving of zero."""
    floor = Work(np.array([100.0] * 99 + [20000.0]), 64)
    elastic = Elastic(lambda k: float(rollout(COST, k, floor)), 8, Limits(window=1))
    advice = elastic.observe(110.0, 10.0)
    assert advice.change == 0
    assert advice.delta > advice.saving
    assert "the longest responses bound" in advice.reason


def test_one_odd_step_changes_nothing():
    elastic = Elastic(lambda k: 120 / k, 4, Limits(window=4, cooldown=0))
    assert [elastic.observe(60 if step % 4 == 2 else 25, 24).change for step in range(12)] == [0] * 12


def test_steps_that_come_in_pairs_count_as_their_mean():
    elastic = Elastic(lambda k: 120 / k, 4, Limits(cooldown=0))
    assert [elastic.observe(60 if step % 2 else 20, 24).change for step in range(6)] == [0, 0, 0, 1, 1, 1]


def test_steps_after_a_change_do_not_count():
    elastic = Elastic(lambda k: 120 / k, 4, Limits(window=1, cooldown=2))
    assert elastic.observe(60, 20).change == 1
    elastic.set_units(5)
    told = [elastic.observe(60, 20) for _ in range(3)]
    assert [advice.change for advice in told] == [0, 0, 1]
    assert told[0].reason == "the last change is recent"


def test_bounds_hold():
    elastic = Elastic(lambda k: 120 / k, 4, Limits(least=4, most=4, window=1))
    assert elastic.observe(100, 1).change == 0
    assert elastic.observe(1, 100).change == 0


@settings(max_examples=200)
@given(st.floats(1, 1000), st.floats(0, 50), st.floats(1, 200), st.integers(1, 32))
def test_the_rule_settles_on_one_number_of_units(work, floor, trained, units):
    """With constant times, the units settle at the needed number."""

    def seconds(k, step=0):
        return floor + work / k

    elastic = Elastic(seconds, units, Limits(most=64, window=2, cooldown=1))
    seen = run(elastic, seconds, lambda step: trained, 400)
    assert len(set(seen[-20:])) == 1
    changes = np.diff([units, *seen])
    assert not ((changes > 0).any() and (changes < 0).any())
    end, margin = seen[-1], 0.02 * max(trained, seconds(seen[-1]))
    if end > 1:
        assert seconds(end - 1) > trained - margin - 1e-6
    if end < 64 and seconds(end) - seconds(end + 1) > margin:
        assert seconds(end + 1) < trained + margin + 1e-6


@settings(max_examples=100)
@given(st.integers(0, 10_000), st.integers(2, 20))
def test_noise_of_a_few_percent_moves_no_unit(seed, units):
    """At balance: a unit more or less is 1 / units, and the noise is less than the half of what is between."""
    rng = np.random.default_rng(seed)
    elastic = Elastic(lambda k: 100 / k, units, Limits())
    seen = run(elastic, lambda k, step: 100 / k, lambda step: 100 / units, 60, noise=0.2 / units, rng=rng)
    assert set(seen) == {units}
