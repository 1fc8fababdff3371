"""Pools of like samples on replicas of their own: whether they are the best there are, and what the policy does."""

import math
import time
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.lengths.outlook import certain, edges
from verl_rhyme.placement import Ahead, Load, Placement, Progress, Request, skewness_aware
from verl_rhyme.placement.pools import Replicas, Samples, several, takes, two
from verl_rhyme.placement.skewness_aware import _Place
from verl_rhyme.planning.cost import ReplicaCost, StepCost

FAST = ReplicaCost(StepCost(5e-3, 33e-6, 26e-9), slots=4, room=30_000)
SLOW = ReplicaCost(StepCost(12e-3, 20e-6, 50e-9), slots=8, room=90_000)
LIMIT = 20_000
COSTS = st.lists(st.sampled_from([FAST, SLOW]), min_size=2, max_size=5)
LENGTHS = st.lists(st.integers(1, LIMIT), min_size=2, max_size=6)


def replicas_of(costs):
    """In the order that the policy gives them."""
    kinds = sorted(set(costs), key=lambda cost: cost.step.base)
    rows = [(c.step.base, c.step.row, c.step.cached, c.slots, c.room) for c in kinds]
    return Replicas(np.array(rows, float), np.cumsum([costs.count(kind) for kind in kinds])), sorted(
        costs, key=lambda cost: cost.step.base
    )


def samples_of(lengths, count=3, begin=100.0):
    tokens = np.sort(np.array(lengths, float))[::-1]
    return Samples(tokens, np.full(len(tokens), float(count)), np.full(len(tokens), begin))


def in_rounds(part, cost, samples, quantile):
    """Seconds of so many of a pool's samples on one replica (StreamRL's model), and of how many there are."""
    tokens, count, begin = (column[part] for column in samples[:3])
    total = int(count.sum())
    ranked = np.repeat(tokens, count.astype(int))
    length = ranked[min(int((1 - quantile) * total + 1e-9), total - 1)]
    context = float((count * tokens * (begin + tokens / 2)).sum() / (count * tokens).sum())
    most = max(1, min(cost.slots, int(cost.room // context)))

    def seconds(own):
        rows = min(own, most)
        return (cost.step.base + (cost.step.row + cost.step.cached * context) * rows) * length * math.ceil(own / most)

    return seconds, total


def until_done(part, cost, samples):
    tokens, count, begin = (column[part] for column in samples[:3])
    whole, held = float((count * tokens).sum()), float((count * tokens * (begin + tokens / 2)).sum())
    total, longest, step = int(count.sum()), float(tokens.max()), cost.step
    alone = longest * (step.base + step.row + step.cached * longest / 2)
    return lambda own: max(alone, float(cost.together(longest, whole * own / total, held * own / total))), total


def best_share(functions, total):
    """The least seconds in which the replicas have done all samples, by trying all."""
    every = sorted({seconds(own) for seconds in functions for own in range(1, total + 1)})
    for bound in every:
        if sum(max((n for n in range(1, total + 1) if f(n) <= bound), default=0) for f in functions) >= total:
            return bound
    raise AssertionError("nobody is done")


def pool_seconds(part, costs, samples, quantile=None):
    made = [until_done(part, c, samples) if quantile is None else in_rounds(part, c, samples, quantile) for c in costs]
    return best_share([seconds for seconds, _ in made], made[0][1])


@settings(max_examples=60)
@given(LENGTHS, COSTS, st.floats(0.05, 0.95), st.sampled_from(["sum", "max"]))
def test_two_pools_are_the_best_there_are(lengths, costs, tail, objective):
    samples, (replicas, ordered) = samples_of(lengths), replicas_of(costs)
    pools = two(samples, replicas, tail, objective)
    cut = pools[0].end
    assert cut == min(max(1, int(tail * len(lengths))), len(lengths) - 1)
    assert [pools[0].begin, pools[1].end, pools[0].first, pools[1].last] == [0, len(lengths), 0, len(costs)]
    assert pools[0].last == pools[1].first
    quantiles = (0.9, 0.5) if objective == "sum" else (None, None)
    together = sum if objective == "sum" else max
    ways = [
        together(
            pool_seconds(part, of, samples, quantile)
            for part, of, quantile in zip(
                (slice(0, cut), slice(cut, None)), (ordered[:width], ordered[width:]), quantiles, strict=True
            )
        )
        for width in range(1, len(costs))
    ]
    assert together(pool.seconds for pool in pools) == pytest.approx(min(ways), rel=1e-6)


@settings(max_examples=60)
@given(LENGTHS, COSTS, st.integers(2, 5))
def test_several_pools_are_the_best_there_are(lengths, costs, most):
    samples, (replicas, ordered) = samples_of(lengths), replicas_of(costs)
    pools = several(samples, replicas, most)
    assert len(pools) <= most
    assert [pool.begin for pool in pools] == [0, *(pool.end for pool in pools[:-1])]
    assert [pool.first for pool in pools] == [0, *(pool.last for pool in pools[:-1])]
    assert (pools[-1].end, pools[-1].last) == (len(lengths), len(costs))
    assert all(pool.end > pool.begin and pool.last > pool.first for pool in pools)
    ways = [
        max(
            pool_seconds(slice(i, j), ordered[a:b], samples)
            for i, j, a, b in zip((0, *cuts), (*cuts, len(lengths)), (0, *ends), (*ends, len(costs)), strict=True)
        )
        for count in range(min(most, len(lengths), len(costs)))
        for cuts in combinations(range(1, len(lengths)), count)
        for ends in combinations(range(1, len(costs)), count)
    ]
    assert max(pool.seconds for pool in pools) == pytest.approx(min(ways), rel=1e-6)


def test_distributions_tell_a_crowd_from_a_few():
    """Of a hundred that may be long one will be, though all are expected to be short."""
    width = np.diff(edges(LIMIT))
    beyond = np.full((101, len(width)), 0.05)
    beyond[:, edges(LIMIT)[1:] <= 1000] = 1.0
    samples = samples_of([2000] * 101, count=1)
    replicas, _ = replicas_of([SLOW] * 4)
    means = several(samples, replicas, 2)
    known = several(samples._replace(beyond=beyond, width=width), replicas, 2)
    assert max(p.seconds for p in known) > 2 * max(p.seconds for p in means)


def test_a_pool_takes_no_longer_with_more_replicas():
    replicas, _ = replicas_of([FAST] * 3 + [SLOW] * 5)
    for rounds in (False, True):
        pool = np.array([40.0, 5000.0, 9e4, 3e8])
        seconds = [takes(0, last, pool, *replicas, rounds) for last in range(1, 9)]
        assert seconds == sorted(seconds, reverse=True)
        assert seconds[0] > 2 * seconds[-1]


# ---- the policy ----


def fleet(costs, **options):
    placement = Placement("skewness_aware", options, cost=costs[0])
    for number, cost in enumerate(costs):
        placement.add(f"r{number}", cost)
        if math.isfinite(cost.room):
            placement.report(f"r{number}", int(cost.room))
    return placement


def requests_of(lengths, had=0):
    rows = certain(lengths, had, LIMIT).beyond
    return [
        Request(f"p{n}-0", f"p{n}", 0, 0, 1, 100, int(tokens), ahead=Ahead(LIMIT, row))
        for n, (tokens, row) in enumerate(zip(lengths, rows, strict=True))
    ]


OPTIONS = [
    {},
    {"objective": "max"},
    {"objective": "max", "pools": 4},
    {"late": True},
    {"objective": "max", "late": True},
    {"objective": "max", "pools": 4, "late": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@settings(max_examples=25)
@given(st.lists(st.integers(1, LIMIT), min_size=1, max_size=60), COSTS, st.data())
def test_every_sample_is_placed_once_and_no_slot_twice(options, lengths, costs, data):
    placement = fleet(costs, **options)
    slots = {f"r{n}": cost.slots for n, cost in enumerate(costs)}
    placement.plan(0, [Load(f"p{n}", 1, float(tokens), 100) for n, tokens in enumerate(lengths)])
    pending, running, placed = requests_of(lengths), {}, []
    while pending or running:
        if pending and placement.due():
            where = placement.place(pending)
            placed += [request.id for request, replica in zip(pending, where, strict=True) if replica is not None]
            running |= {r.id: at for r, at in zip(pending, where, strict=True) if at is not None}
            pending = [request for request, replica in zip(pending, where, strict=True) if replica is None]
            if options.get("late"):
                assert all(list(running.values()).count(name) <= count for name, count in slots.items())
            else:
                assert not pending, "the step is bound at its start"
        if running:
            name = data.draw(st.sampled_from(sorted(running)))
            placement.release(name, running.pop(name), 7)
        if watched := placement.watched():
            ahead = Ahead(LIMIT, certain([500], 10, LIMIT).beyond[0])
            assert placement.moves({name: Progress(10, 490, 490, ahead) for name in watched}) == []
    assert sorted(placed) == sorted(f"p{n}-0" for n in range(len(lengths)))
    assert placement.errors == 0, placement.last_error
    assert placement.fleet.totals == [0, 0]
    assert not placement.policy._runs
    assert not placement.policy._coming


@pytest.mark.parametrize("options", [options for options in OPTIONS if "pools" not in options])
def test_the_tail_has_a_pool_of_its_own(options):
    placement = fleet([SLOW] * 4, **options)
    lengths = [10_000] * 4 + [300] * 16
    placement.plan(0, [Load(f"p{n}", 1, float(tokens), 100) for n, tokens in enumerate(lengths)])
    where = placement.place(requests_of(lengths))
    assert placement.errors == 0, placement.last_error
    assert not set(where[:4]) & set(where[4:])
    assert {placement.reason(f"p{n}-0").partition(",")[0].partition(" in ")[0] for n in range(4)} == {"pool 1 of 2"}
    assert "pool 2 of 2" in placement.reason("p19-0")
    assert placement.reason("p19-0").endswith("replicas")


def test_long_ones_go_to_the_replicas_that_are_fast_alone_and_each_has_what_it_can_do():
    placement = fleet([SLOW, FAST, SLOW, FAST, SLOW, SLOW], objective="max", pools=2, tail=0.2)
    lengths = [15_000] * 6 + [1_000] * 24
    placement.plan(0, [Load(f"p{n}", 1, float(tokens), 100) for n, tokens in enumerate(lengths)])
    where = placement.place(requests_of(lengths))
    assert {"r1", "r3"} <= set(where[:6])
    assert set(where[:6]).isdisjoint(where[6:])
    mixed = fleet([FAST, SLOW, SLOW], objective="max", tail=0.01)
    lengths = [9_000] + [2_000] * 60
    mixed.plan(0, [Load(f"p{n}", 1, float(tokens), 100) for n, tokens in enumerate(lengths)])
    counts = [mixed.place(requests_of(lengths)).count(f"r{n}") for n in range(3)]
    assert counts[0] == 1
    assert abs(counts[1] - counts[2]) <= 1


def test_kinds_share_a_pool_by_what_each_can_do():
    quick = ReplicaCost(StepCost(1e-3), slots=8)
    slow = ReplicaCost(StepCost(3e-3), slots=8)
    placement = fleet([quick, quick, slow], objective="max", tail=0.5)
    lengths = [8_000] * 1 + [1_000] * 1
    placement.plan(0, [Load(f"p{n}", 64, float(tokens), 0) for n, tokens in enumerate(lengths)])
    requests = [Request(f"p0-{n}", "p0", n, 0, 64, 0, 8_000) for n in range(64)]
    assert set(placement.place(requests)) == {"r0", "r1"}
    mixed = fleet([quick, slow, slow], objective="max", tail=0.5)
    mixed.plan(0, [Load("p0", 64, 1_000.0), Load("p1", 8, 2.0)])
    requests = [Request(f"p0-{n}", "p0", n, 0, 64, 0, 1_000) for n in range(64)]
    counts = [mixed.place(requests).count(name) for name in ("r0", "r1", "r2")]
    assert counts == [48, 16, 0], "three times as fast, three times as many"


def test_what_finds_no_slot_is_planned_anew_when_some_have_ended():
    placement = fleet([FAST] * 3, objective="max", pools=3, late=True)
    lengths = [18_000, 17_000, *([2_000] * 14)]
    requests = requests_of(lengths)
    where = placement.place(requests)
    waiting = [request for request, replica in zip(requests, where, strict=True) if replica is None]
    assert waiting
    assert not placement.due(), "nothing has ended"
    assert not placement.watched()
    assert all(where[:2]), "the longest go first"
    for request, replica in zip(requests, where, strict=True):
        if replica is not None and request.response_tokens == 2_000:
            placement.release(request.id, replica, 2_000)
    assert sorted(placement.watched()) == ["p0-0", "p1-0"]
    rows = certain(lengths[:2], 17_500, LIMIT).beyond  # which soon end, too
    left = {f"p{n}-0": Progress(17_500, 500, 500, Ahead(LIMIT, row)) for n, row in enumerate(rows)}
    assert placement.moves(left) == []
    assert placement.due()
    assert None not in placement.place(waiting)
    assert placement.fleet.totals[0] == 2 + len(waiting)
    assert placement.errors == 0, placement.last_error


def late_with_the_tail_apart(counts, waiting):
    """Three replicas of four slots and two pools, of which the first has so many samples to go, on one replica."""
    placement = fleet([FAST] * 3, objective="max", late=True, tail=0.1)
    placement.policy._places = lambda of, samples: [
        (_Place("pool 1 of 2", 9_000.0, {"r0": 1.0}), slice(0, counts)),
        (_Place("pool 2 of 2", 10.0, {"r1": 1.0, "r2": 1.0}), slice(counts, None)),
    ]
    requests = requests_of([9_000] * counts + list(range(2_000 + waiting, 2_000, -1)))
    return placement, placement.place(requests)


def test_no_slot_stands_idle_while_more_wait_than_there_are_slots():
    """The shortest of those that wait go where another pool has no use for a slot."""
    placement, where = late_with_the_tail_apart(1, 40)
    assert where[0] == "r0"
    assert sorted(filter(None, where)) == ["r0"] * 4 + ["r1"] * 4 + ["r2"] * 4
    assert where[1:9].count("r0") == 0, "its own pool's slots first"
    assert where[-3:] == ["r0"] * 3, "then the shortest, which are soonest gone"
    assert placement.reason("p40-0").endswith("in a slot that another pool left free")
    assert "pool 2 of 2" in placement.reason("p40-0")
    assert placement.errors == 0, placement.last_error


def test_a_slot_is_left_free_where_there_are_slots_for_all():
    """Eleven for twelve slots: those of the second pool wait for theirs, and the long one has short steps."""
    _, where = late_with_the_tail_apart(1, 10)
    assert (where.count("r0"), where.count(None)) == (1, 2)
    _, where = late_with_the_tail_apart(1, 12)  # one more than there are slots: one of four would wait anyhow
    assert (where.count("r0"), where.count(None)) == (2, 3)


def test_the_longest_have_the_first_slots_in_whatever_order_they_come():
    placement = fleet([FAST] * 2, objective="max", late=True)
    requests = requests_of([100, 18_000, 200, 17_000, *([300] * 20)])
    where = dict(zip((r.id for r in requests), placement.place(requests), strict=True))
    assert where["p1-0"] is not None
    assert where["p3-0"] is not None
    assert where["p0-0"] is None, "the shortest"


def test_engines_whose_caches_differ_by_a_little_are_of_one_kind(monkeypatch):
    """Each engine reports its own room; as so many kinds, a thousand replicas are planned three times as slowly."""
    placement, seen = fleet([SLOW] * 6, objective="max", pools=3), []
    monkeypatch.setattr(skewness_aware, "several", lambda *of: seen.append(of[1].kinds) or several(*of))
    for number, room in enumerate((81_000, 80_990, 80_500, 81_200, 40_000, 40_100)):
        placement.report(f"r{number}", room)
    placement.plan(0, [Load(f"p{n}", 1, 100.0 * n, 100) for n in range(1, 20)])
    assert placement.errors == 0, placement.last_error
    assert len(seen[0]) == 2
    assert all(0.95 * 40_000 < kind[4] <= 81_200 for kind in seen[0])


def test_a_hundred_thousand_prompts_on_a_thousand_replicas_are_planned_in_a_second():
    costs, options = [FAST, SLOW] * 512, {"objective": "max", "pools": 8}
    fleet(costs[:2], **options).plan(0, [Load("a", 1, 9.0), Load("b", 1, 5.0)])  # compiled before
    placement = fleet(costs, **options)
    lengths = np.random.default_rng(0).lognormal(7.8, 1, 100_000).clip(1, LIMIT)
    loads = [Load(f"p{n}", 16, tokens, 300) for n, tokens in enumerate(lengths.tolist())]
    began = time.process_time()
    placement.plan(0, loads)
    assert time.process_time() - began < 1
    assert placement.errors == 0, placement.last_error
    assert len(placement.policy._pool) == 100_000
