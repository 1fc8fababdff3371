"""Separate replicas for long responses: whether the split is optimal, and how the policy uses it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.placement import Load, Placement, Request
from verl_rhyme.planning.cost import ReplicaCost, StepCost

FAST = ReplicaCost(StepCost(5e-3, 33e-6, 26e-9), slots=4, room=30_000)
SLOW = ReplicaCost(StepCost(12e-3, 20e-6, 50e-9), slots=8, room=90_000)
LIMIT = 20_000


def fleet(cost, replicas, **options):
    placement = Placement("skewness_aware", options, cost=cost)
    for number in range(replicas):
        placement.fleet.add(f"r{number}", int(cost.room))
    return placement


def loads_of(lengths, samples=1):
    return [Load(f"p{n}", samples, float(tokens), 100) for n, tokens in enumerate(lengths)]


def requests_of(lengths):
    return [
        Request(f"p{n}-0", f"p{n}", prompt_tokens=100, response_tokens=int(tokens)) for n, tokens in enumerate(lengths)
    ]


def seconds(lengths, samples, cost, replicas, quantile):
    """StreamRL's model, one sample after another: rounds of as many as slots and cache hold."""
    ranked = sorted(lengths, reverse=True)
    each = [tokens for tokens in ranked for _ in range(samples)]
    length = each[min(int((1 - quantile) * len(each)), len(each) - 1)]
    context = sum(tokens * (100 + tokens / 2) for tokens in each) / sum(each)
    most = max(1, min(cost.slots, int(cost.room // context)))
    own = math.ceil(len(each) / replicas)
    rows = min(own, most)
    step = cost.step.base + (cost.step.row + cost.step.cached * context) * rows
    return step * length * math.ceil(own / most)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, LIMIT), min_size=2, max_size=30),
    st.integers(1, 3),
    st.sampled_from([FAST, SLOW]),
    st.integers(2, 9),
    st.floats(0.05, 0.95),
)
def test_two_pools_are_the_best_there_are(lengths, samples, cost, replicas, tail):
    placement = fleet(cost, replicas, tail=tail)
    placement.plan(0, loads_of(lengths, samples))
    pools = {pool.name: pool for pool in placement.policy._pools.values()}
    first, second = (pools[f"pool {rank} of 2 in step 0"] for rank in (1, 2))
    assert sorted((*first.names, *second.names)) == sorted(placement.fleet.names)
    ranked = sorted(lengths, reverse=True)
    cut = min(max(1, int(tail * len(lengths))), len(lengths) - 1)
    assert sum(pool is first for pool in placement.policy._pools.values()) == cut
    ways = [
        seconds(ranked[:cut], samples, cost, width, 0.9) + seconds(ranked[cut:], samples, cost, replicas - width, 0.5)
        for width in range(1, replicas)
    ]
    assert ways[len(first.names) - 1] == pytest.approx(min(ways), rel=1e-6)
    assert placement.errors == 0, placement.last_error


def test_the_least_loaded_serves_where_a_pools_replicas_have_left():
    placement = fleet(SLOW, 4)
    lengths = [10_000] * 4 + [300] * 16
    placement.plan(0, loads_of(lengths))
    for name in placement.policy._pools["p0"].names:
        placement.remove(name)
    assert placement.acquire(requests_of(lengths)[0]) in placement.fleet
    assert placement.reason("p0-0") == "replica with the fewest tokens"
    assert placement.errors == 0, placement.last_error
