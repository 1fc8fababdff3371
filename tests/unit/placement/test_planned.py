"""Policies that use length forecasts: plans and moves."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import cpu_seconds
from verl_rhyme.placement import POLICIES, Load, Placement, Progress, Request
from verl_rhyme.planning.cost import ReplicaCost, StepCost

COST = ReplicaCost(StepCost(10e-3, 33e-6, 26e-9), slots=8, room=50_000)
LENGTHS = st.lists(st.one_of(st.none(), st.floats(1, 20_000)), min_size=1, max_size=40)


def fleet(policy, replicas=4, cost=COST, **options):
    placement = Placement(policy, options, cost=cost)
    for number in range(replicas):
        placement.fleet.add(f"r{number}", int(cost.room))
    return placement


def loads(lengths, samples=2):
    return [Load(f"p{n}", samples, tokens, 100) for n, tokens in enumerate(lengths)]


def place(placement, lengths, samples=2, likely=None):
    """Place all samples of these prompts in order; return the replica of each, by id."""
    placement.plan(0, loads(lengths, samples))
    where = {}
    for n, tokens in enumerate(lengths):
        for number in range(samples):
            tokens_ = None if tokens is None else int(tokens)
            request = Request(f"p{n}-{number}", f"p{n}", 100, tokens_, likely)
            where[request.id] = placement.acquire(request)
    return where


def groups(placement):
    return placement.policy._groups


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 8), st.integers(1, 6), st.integers(0, 3), st.booleans())
def test_length_groups_share_the_replicas_out(lengths, replicas, most, step, two_tier):
    placement = fleet("histopipe", replicas, groups=most, two_tier=two_tier)
    placement.plan(step, loads(lengths))
    made = groups(placement)
    assert len(made) == min(most, replicas, len(lengths))
    names = [name for group in made for name in group.pool.names]
    assert names == [f"r{n}" for n in (range(replicas) if step % 2 == 0 else reversed(range(replicas)))]
    assert all(group.pool.names for group in made)
    assert sum(group.samples for group in made) == 2 * len(lengths)


@settings(max_examples=40)
@given(st.lists(st.floats(1, 20_000), min_size=3, max_size=12), st.integers(3, 7))
def test_the_second_tier_is_the_best_there_is(lengths, replicas):
    placement = fleet("histopipe", replicas, groups=3)
    placement.plan(0, loads(lengths))
    ranked = [np.sort(lengths)[part] for part in np.array_split(np.arange(len(lengths)), 3)]

    def slowest(widths):
        return max(
            COST.together(g.max(), 2 * g.sum() / w, 2 * (g * (100 + g / 2)).sum() / w)
            for g, w in zip(ranked, widths, strict=True)
        )

    ways = [widths for widths in product(range(1, replicas), repeat=3) if sum(widths) == replicas]
    chosen = [len(group.pool.names) for group in groups(placement)]
    assert slowest(chosen) <= min(map(slowest, ways)) * (1 + 1e-9)


def test_a_replica_with_long_responses_gets_short_ones_next():
    placement = fleet("histopipe", 2, groups=2, two_tier=False)
    lengths = [100.0, 100.0, 9000.0, 9000.0]
    placement.plan(0, loads(lengths))
    placement.plan(1, [load._replace(key=f"next-{load.key}") for load in loads(lengths)])
    first = {n: placement.acquire(Request(f"p{n}-0", f"p{n}", response_tokens=int(t))) for n, t in enumerate(lengths)}
    then = {n: placement.acquire(Request(f"n{n}-0", f"next-p{n}")) for n, t in enumerate(lengths)}
    assert first == {0: "r0", 1: "r0", 2: "r1", 3: "r1"}
    assert then == {0: "r1", 1: "r1", 2: "r0", 3: "r0"}
    assert placement.reason("p3-0") == "length group 2 of 2 in step 0, on 1 replicas"
    placement.acquire(Request("late-0", "late"))
    assert placement.reason("late-0") == "replica with the fewest tokens"
    assert placement.reason("nobody-0") == ""


def test_an_outlier_moves_once_to_the_replica_with_less_work():
    placement = fleet("histopipe", 2, groups=1, tail=0.25)
    where = place(placement, [1000.0, 1000.0], samples=2, likely=1500)
    names = sorted(where)
    assert placement.watched() == [], "nothing of the group has ended"
    for name in names[:-1]:
        placement.release(name, 1000)
    last = names[-1]
    assert placement.watched() == [last]
    assert placement.moves({last: Progress(1501, 500, 900)}) == [], "nowhere less would be to do"
    placement.acquire(Request("other-0", "other", response_tokens=100_000, replica=where[last]))
    assert placement.moves({last: Progress(1500, 500, 900)}) == [], "its history lets expect as much"
    assert placement.moves({}) == [], "nobody knows how far it is"
    [move] = placement.moves({last: Progress(1501, 500, 900)})
    assert (move.id, move.replica) == (last, "r0" if where[last] == "r1" else "r1")
    assert "1501 tokens" in move.reason
    placement.acquire(Request("more-0", "more", response_tokens=300_000, replica=move.replica))
    assert placement.moves({last: Progress(5000, 1, 2)}) == []


def test_an_interrupted_request_has_not_ended():
    """Otherwise the first weight sync would make every running response one of the last."""
    placement = fleet("histopipe", 2, groups=1, tail=0.1)
    where = place(placement, [1000.0] * 10, samples=2, likely=10)
    for name in where:
        placement.release(name)  # interrupted, and continued
        placement.acquire(Request(name, name.partition("-")[0], response_tokens=500, p90_tokens=10))
    assert placement.watched() == []


def test_failed_prompts_do_not_count_for_the_group():
    placement = fleet("histopipe", 2, groups=1)
    where = place(placement, [1000.0] * 10, samples=4, likely=1500)
    names = list(where)
    for name in names[:8]:
        placement.release(name)
    placement.forget_prompts(["p0", "p1"])
    for name in names[8:-1]:
        placement.release(name, 900)
    assert placement.watched() == names[-1:]
    placement.forget_prompts([f"p{n}" for n in range(2, 9)])
    assert placement.watched() == names[-1:], "nothing of these was left out"
    placement.forget_prompts(["p9"])
    assert not groups(placement)


def test_outliers_spread_over_the_replicas_that_have_room():
    placement = fleet("histopipe", 8, groups=1, tail=1.0)
    placement.plan(0, loads([1000.0] * 64, samples=1))
    for n in range(64):
        placement.acquire(Request(f"p{n}-0", f"p{n}", 0, 1000, 900, replica="r0"))
    moves = placement.moves({name: Progress(950, 3000, 5000) for name in placement.watched()})
    tokens = placement.fleet.tokens
    assert len(moves) > 30
    assert tokens.max() - tokens.min() <= 5000, "where the first one went more is to do for the next"


def test_prompts_that_left_leave_nothing():
    kept_by = {"histopipe": "_of", "skewness_aware": "_pools"}
    for policy, name in kept_by.items():
        placement = fleet(policy, 4)
        for step in range(40):  # far more than are under way at a time
            prompts = [load._replace(key=f"{step}-{load.key}") for load in loads([100.0, 5000.0] * 8)]
            placement.plan(step, prompts)
            if step >= 20:
                placement.forget_prompts([f"{step - 20}-{load.key}" for load in loads([100.0, 5000.0] * 8)])
        kept = getattr(placement.policy, name)
        assert len(kept) == 20 * 16
        placement.forget_prompts(list(kept))
        assert not kept
        assert policy != "histopipe" or not groups(placement)


def test_a_moved_request_counts_on_its_new_replica_with_its_tokens():
    placement = fleet("histopipe", 2, groups=1, tail=1.0)
    placement.plan(0, loads([1000.0], samples=1))
    at = placement.acquire(Request("p0-0", "p0", 100, 1000, 1200))
    placement.acquire(Request("x-0", "x", response_tokens=5000, replica=at))
    [move] = placement.moves({"p0-0": Progress(1300, 400, 800)})
    assert move.replica != at
    tokens = dict(zip(placement.fleet.names, placement.fleet.tokens.tolist(), strict=True))
    assert tokens[move.replica] == 100 + 1300 + 400, "its prompt, what it has, and what is expected now"
    assert tokens[at] == 5000
    placement.release("p0-0", 1400)
    assert placement.watched() == []


def test_longest_first_is_within_four_thirds_of_the_best():
    rng = np.random.default_rng(1)
    for _ in range(20):
        lengths = np.sort(rng.integers(1, 100, 7))[::-1]
        placement = fleet("longest_first", 3)
        load = dict.fromkeys(placement.fleet.names, 0)
        for n, tokens in enumerate(lengths.tolist()):
            load[placement.acquire(Request(f"{n}-0", str(n), response_tokens=tokens))] += tokens
        best = min(
            max(sum(t for t, at in zip(lengths, where, strict=True) if at == r) for r in range(3))
            for where in product(range(3), repeat=len(lengths))
        )
        assert max(load.values()) <= (4 / 3 - 1 / 9) * best


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("histopipe", {"groups": 0}),
        ("skewness_aware", {"tail": 1.0}),
    ],
)
def test_impossible_options_are_rejected(policy, options):
    with pytest.raises(ValueError, match=f"{policy}: .*must be"):
        Placement(policy, options)


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_step_of_a_hundred_thousand_prompts_on_a_thousand_replicas(policy):
    """The limit is generous: the test detects a cost that grows with prompts times replicas."""
    placement = fleet(policy, 1024)
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.lognormal(7.8, 1, 100_000).clip(1, 20_480))[::-1]
    prompts = loads(lengths.tolist(), samples=1)
    requests = [Request(f"p{n}-0", f"p{n}", 100, int(tokens)) for n, tokens in enumerate(lengths[:5000].tolist())]
    assert cpu_seconds(lambda: placement.plan(0, prompts)) < 1
    assert cpu_seconds(lambda: [placement.acquire(request) for request in requests]) / 5000 < 1e-3
    assert placement.errors == 0
