"""Policies that go by forecasts of lengths: what they plan, and what they move."""

import random
import time
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_rhyme.config import LENGTH_PLACEMENTS
from verl_rhyme.lengths.outlook import CELLS, certain, edges
from verl_rhyme.placement import POLICIES, Ahead, Load, Placement, Progress, Request
from verl_rhyme.planning.cost import ReplicaCost, StepCost

COST = ReplicaCost(StepCost(10e-3, 33e-6, 26e-9), slots=8, room=50_000)
LENGTHS = st.lists(st.one_of(st.none(), st.floats(1, 20_000)), min_size=1, max_size=40)


def fleet(policy, replicas=4, cost=COST, **options):
    placement = Placement(policy, options, cost=cost)
    for number in range(replicas):
        placement.add(f"r{number}")
        placement.report(f"r{number}", int(cost.room))
    return placement


def loads(lengths, samples=2):
    return [Load(f"p{n}", samples, tokens, 100) for n, tokens in enumerate(lengths)]


def place(placement, lengths, samples=2, likely=None):
    """All samples of these prompts, in their order: replica of each, by id."""
    placement.plan(0, loads(lengths, samples))
    where = {}
    for n, tokens in enumerate(lengths):
        for number in range(samples):
            tokens_ = None if tokens is None else int(tokens)
            request = Request(f"p{n}-{number}", f"p{n}", number, 0, samples, 100, tokens_, p90_tokens=likely)
            where[request.id] = placement.acquire(request)
    return where


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LENGTH_PLACEMENTS), LENGTHS, st.integers(1, 6), st.integers(1, 4), st.data())
def test_whatever_comes_is_placed_and_leaves_nothing(policy, lengths, replicas, samples, data):
    placement = fleet(policy, replicas)
    placement.plan(0, loads(lengths, samples))
    where = place(placement, lengths, samples)
    if replicas > 1:
        gone = data.draw(st.sampled_from(placement.fleet.names))
        placement.remove(gone)
        assert gone not in {placement.acquire(Request(f"late-{n}", f"p{n}")) for n in range(5)}
        for n in range(5):
            for name in list(placement.fleet.names):
                placement.release(f"late-{n}", name, 3)
    for name, replica in where.items():
        placement.release(name, replica, 7)
    assert placement.errors == 0, placement.last_error
    assert placement.fleet.totals == [0, 0]
    if policy == "makespan":
        assert np.allclose(placement.policy.seconds(), 0, atol=1e-6)


def groups(placement):
    return list(placement.policy._groups.values())


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 8), st.integers(1, 6), st.integers(0, 3), st.booleans())
def test_length_groups_share_the_replicas_out(lengths, replicas, most, step, two_tier):
    placement = fleet("histopipe", replicas, groups=most, two_tier=two_tier)
    placement.plan(step, loads(lengths))
    made = groups(placement)
    assert len(made) == min(most, replicas, len(lengths))
    names = [name for group in made for name in group.replicas]
    assert names == [f"r{n}" for n in (range(replicas) if step % 2 == 0 else reversed(range(replicas)))]
    assert all(group.replicas for group in made)
    assert sum(group.samples for group in made) == 2 * len(lengths)


@settings(max_examples=40, deadline=None)
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
    chosen = [len(group.replicas) for group in groups(placement)]
    assert slowest(chosen) <= min(map(slowest, ways)) * (1 + 1e-9)


def test_a_replica_with_a_long_share_gets_a_short_one_next():
    placement = fleet("histopipe", 2, groups=2, two_tier=False)
    lengths = [100.0, 100.0, 9000.0, 9000.0]
    placement.plan(0, loads(lengths))
    placement.plan(1, [load._replace(key=f"next-{load.key}") for load in loads(lengths)])
    first = {n: placement.acquire(Request(f"p{n}-0", f"p{n}", response_tokens=int(t))) for n, t in enumerate(lengths)}
    then = {n: placement.acquire(Request(f"n{n}-0", f"next-p{n}")) for n, t in enumerate(lengths)}
    assert first == {0: "r0", 1: "r0", 2: "r1", 3: "r1"}
    assert then == {0: "r1", 1: "r1", 2: "r0", 3: "r0"}
    assert placement.reason("p3-0") == "length group 2 of 2 in step 0, on 1 replicas"


def test_an_outlier_goes_on_where_less_is_to_do_and_only_once():
    placement = fleet("histopipe", 2, groups=1, tail=0.25)
    where = place(placement, [1000.0, 1000.0], samples=2, likely=1500)
    names = sorted(where)
    assert placement.watched() == [], "nothing of the group has ended"
    for name in names[:-1]:
        placement.release(name, where[name], 1000)
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


def test_an_outlier_that_was_to_be_short_weighs_what_it_has_to_go():
    """Loads as of the start would have both of these done."""
    placement = fleet("histopipe", 2, groups=1, tail=1.0)
    placement.plan(0, loads([1000.0]))
    for number in range(2):
        placement.acquire(Request(f"p0-{number}", "p0", number, 0, 2, 0, 1000, p90_tokens=2000, replica="r0"))
    moves = placement.moves({name: Progress(2500, 3000, 5000) for name in placement.watched()})
    assert [move.replica for move in moves] == ["r1"], "one of them; then neither replica has less to do"
    assert placement.errors == 0, placement.last_error


def test_an_outlier_goes_where_the_others_are_nearly_done():
    """Others are as old as what was asked, or as what ended there."""
    placement = fleet("histopipe", 3, groups=1, tail=0.7)
    placement.plan(0, loads([1000.0], samples=3))
    for number, at in enumerate(["r0", "r0", "r1"]):
        placement.acquire(Request(f"p0-{number}", "p0", number, 0, 3, 0, 1000, p90_tokens=2000, replica=at))
    for name, at in (("old-0", "r1"), ("new-0", "r2")):
        placement.acquire(Request(name, name, response_tokens=4000, replica=at))
    placement.release("p0-2", "r1", 3900)
    progress = {name: Progress(2500, 3000, 5000) for name in placement.watched()}
    assert set(progress) == {"p0-0", "p0-1"}
    assert [move.replica for move in placement.moves(progress)] == ["r1"], "100 tokens to come there, at r2 4,000"
    assert placement.errors == 0, placement.last_error


def test_a_replica_full_of_late_ones_is_not_taken_for_one_with_nothing_to_do():
    placement = fleet("histopipe", 3, groups=1, tail=1.0)
    placement.plan(0, loads([1000.0]))
    for number in range(2):
        placement.acquire(Request(f"p0-{number}", "p0", number, 0, 2, 0, 1000, p90_tokens=2000, replica="r0"))
    for n in range(9):
        placement.acquire(Request(f"late-{n}", f"late-{n}", response_tokens=1000, replica="r1"))
    placement.acquire(Request("short-0", "short", response_tokens=300, replica="r2"))
    placement.release("late-0", "r1", 2500)
    moves = placement.moves({name: Progress(2500, 3000, 5000) for name in placement.watched()})
    assert [move.replica for move in moves] == ["r2"], "what r1 has was to be done by now, but is not"
    assert placement.errors == 0, placement.last_error


def test_what_is_cut_short_has_not_ended():
    """Else the first weight sync would make of every running response one of the last."""
    placement = fleet("histopipe", 2, groups=1, tail=0.1)
    where = place(placement, [1000.0] * 10, samples=2, likely=10)
    for name, replica in where.items():
        placement.release(name, replica)  # cut short, and on again
        placement.acquire(Request(name, name.partition("-")[0], response_tokens=500, p90_tokens=10))
    assert placement.watched() == []


def test_what_failed_is_waited_for_no_more():
    placement = fleet("histopipe", 2, groups=1)
    where = place(placement, [1000.0] * 10, samples=4, likely=1500)
    names = list(where)
    for name in names[:8]:
        placement.release(name, where[name])
    placement.left(["p0", "p1"])
    for name in names[8:-1]:
        placement.release(name, where[name], 900)
    assert placement.watched() == names[-1:]
    placement.left([f"p{n}" for n in range(2, 9)])
    assert placement.watched() == names[-1:], "nothing of these was left out"
    placement.left(["p9"])
    assert not groups(placement)


def test_outliers_spread_over_the_replicas_that_have_room():
    placement = fleet("histopipe", 8, groups=1, tail=1.0)
    placement.plan(0, loads([1000.0] * 64, samples=1))
    for n in range(64):
        placement.acquire(Request(f"p{n}-0", f"p{n}", 0, 0, 1, 0, 1000, p90_tokens=900, replica="r0"))
    moves = placement.moves({name: Progress(950, 3000, 5000) for name in placement.watched()})
    requests = placement.fleet.running[0]
    assert len(moves) > 40
    assert requests.max() - requests.min() <= 2, "where the first one went more is to do for the next"


def test_prompts_that_left_leave_nothing():
    kept_by = {"histopipe": "_of", "skewness_aware": "_pool", "longest_first": "_tenth"}
    for policy, name in kept_by.items():
        placement = fleet(policy, 4)
        for step in range(40):  # far more than are under way at a time
            prompts = [load._replace(key=f"{step}-{load.key}") for load in loads([100.0, 5000.0] * 8)]
            placement.plan(step, prompts)
            if step >= 20:
                placement.left([f"{step - 20}-{load.key}" for load in loads([100.0, 5000.0] * 8)])
        kept = getattr(placement.policy, name)
        assert len(kept) == 20 * 16
        placement.left(list(kept))
        assert not kept
        assert policy != "histopipe" or not groups(placement)


def test_what_moves_counts_where_it_went_with_what_it_has():
    placement = fleet("histopipe", 2, groups=1, tail=1.0)
    placement.plan(0, loads([1000.0], samples=1))
    at = placement.acquire(Request("p0-0", "p0", 0, 0, 1, 100, 1000, p90_tokens=1200))
    placement.acquire(Request("x-0", "x", response_tokens=5000, replica=at))
    [move] = placement.moves({"p0-0": Progress(1300, 400, 800)})
    assert move.replica != at
    tokens = dict(zip(placement.fleet.names, placement.fleet.running[1].tolist(), strict=True))
    assert tokens[move.replica] == 100 + 1300 + 400, "its prompt, what it has, and what is expected now"
    assert tokens[at] == 5000
    assert placement.release("p0-0", move.replica, 1400)
    assert placement.watched() == []


def test_makespan_reckons_what_was_added_there():
    """A replica whose requests came with tokens is not done when the first of them is."""
    placement = fleet("makespan", 2)
    for n in range(16):
        placement.acquire(Request(f"p{n}-0", f"p{n}", prompt_tokens=8000, response_tokens=500, replica="r0"))
    placement.release("p0-0", "r0", 400)
    assert placement.policy.seconds()[0] > 15 * 100 * COST.step.row
    assert placement.acquire(Request("new-0", "new", response_tokens=10)) == "r1"


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


def test_makespan_keeps_a_long_response_apart_from_a_crowd():
    placement = fleet("makespan", 2)
    where = place(placement, [20_000.0] + [500.0] * 6, samples=1)
    beside = sum(replica == where["p0-0"] for replica in where.values())
    assert beside < 7 / 2, "slots of the replica with the long one were filled as the other's"


LIMIT = 20_000


def known(lengths, had=0):
    """Requests of lengths that are known."""
    rows = certain(lengths, had, LIMIT).beyond
    return [
        Request(f"p{n}-0", f"p{n}", 0, 0, 1, 0, int(tokens), ahead=Ahead(LIMIT, row))
        for n, (tokens, row) in enumerate(zip(lengths, rows, strict=True))
    ]


def maybe(chance, short, long):
    """The outlook of a response that gets long by such a chance, else stays short."""
    rows = certain([short, long], 0, LIMIT).beyond
    return Ahead(LIMIT, (1 - chance) * rows[0] + chance * rows[1])


CROWDED = [1] * 10 + [
    75,
    183,
    183,
    254,
    333,
    362,
    680,
    1596,
    1,
    3,
    1642,
    4865,
    12535,
    20000,
    12536,
    19478,
    20000,
    19544,
]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, LIMIT), min_size=1, max_size=60), st.integers(1, 4), st.integers(1, 5), st.randoms())
@example(CROWDED, 3, 3, random.Random(376))  # all replicas are full, and one has a long way to go
def test_what_waits_is_bound_late_and_once(lengths, replicas, slots, random):
    placement = fleet("makespan", replicas, ReplicaCost(COST.step, slots=slots, room=50_000))
    waiting, running, seen = known(lengths), [], []
    while waiting or running:
        if waiting and (placement.due() or not seen):
            found = dict(zip((r.id for r in waiting), placement.place(waiting), strict=True))
            now = [(r, found[r.id]) for r in waiting if found[r.id] is not None]
            assert now or running, "of a fleet that does nothing one starts at least"
            seen += [r.id for r, _ in now]
            running += now
            waiting = [r for r in waiting if found[r.id] is None]
            assert placement.fleet.running[0].max() <= slots
        request, replica = running.pop(random.randrange(len(running)))
        placement.release(request.id, replica, request.response_tokens)
        for name in placement.watched():
            assert name in {r.id for r, _ in running}
        left = {r.id: Progress(0, r.response_tokens, r.response_tokens, r.ahead) for r, _ in running}
        moves = {move.id: move.replica for move in placement.moves(left)}
        running = [(r, moves.get(r.id, replica)) for r, replica in running]
    assert sorted(seen) == sorted(f"p{n}-0" for n in range(len(lengths)))
    assert placement.errors == 0, placement.last_error
    assert placement.fleet.totals == [0, 0]


@pytest.mark.parametrize("look", [False, True])
def test_what_a_coordinator_finds_running_does_not_keep_distributions_out(look):
    """After a restart: of what runs nobody said how long it may be, nor up to which limit."""
    placement = fleet("makespan", 4)
    for n in range(3):
        placement.acquire(Request(f"old-{n}", "old", n, 0, 3, 0, replica="r0"))
    ahead = maybe(0.5, 100, 16_000)
    if look:
        placement.moves({"old-1": Progress(5, 8_050, 16_000, ahead)})
    placement.place([Request(f"p{n}-0", f"p{n}", 0, 0, 1, 0, 8_050, 16_000, ahead=ahead) for n in range(8)])
    rows = placement.policy._runs["p0-0"][0].rows
    assert np.allclose(np.exp(rows[0]), 1 - np.minimum(ahead.beyond, 1 - 1e-6), atol=1e-6)
    assert placement.policy._limit == LIMIT
    for name in [*(f"p{n}-0" for n in range(8)), *(f"old-{n}" for n in range(3))]:
        placement.release(name, placement._running[name][0][1], 7)
    assert placement.errors == 0, placement.last_error
    assert np.allclose(placement.policy.seconds(), 0, atol=1e-6)


@pytest.mark.parametrize(("replicas", "most"), [(4, 10**6), (4, 16), (1, 10**6)])
def test_what_waits_is_planned_anew_soon_however_much_runs(monkeypatch, replicas, most):
    """A look at some, too, is a look: or a quarter of the slots would stand empty before what waits is planned."""
    monkeypatch.setattr("verl_rhyme.placement.makespan._WATCHED", most)
    placement = fleet("makespan", replicas, ReplicaCost(COST.step, slots=16, room=10**7))
    requests = known([4_000] * 100)
    where = dict(zip((r.id for r in requests), placement.place(requests), strict=True))
    running = [name for name, replica in where.items() if replica is not None]
    assert len(running) == 16 * replicas
    ended = running[: 1 + len(running) // 50]
    for name in ended:
        placement.release(name, where[name], 4_000)
    watched = placement.watched()
    assert 0 < len(watched) <= min(most, len(running) - len(ended))
    ahead = Ahead(LIMIT, certain([4_000], 2_000, LIMIT).beyond[0])
    placement.moves({name: Progress(2_000, 2_000, 2_000, ahead) for name in watched})
    assert placement.due()
    assert sum(replica is not None for replica in placement.place(requests[-10:])) >= len(ended)
    assert placement.errors == 0, placement.last_error


def test_of_more_than_can_be_looked_at_each_has_its_turn(monkeypatch):
    monkeypatch.setattr("verl_rhyme.placement.makespan._WATCHED", 10)
    placement = fleet("makespan", 4, ReplicaCost(COST.step, 1e-6, slots=64, room=10**7), gain=1e-3)
    for n, request in enumerate(known([8_000] * 40)):
        placement.acquire(request._replace(replica=f"r{max(0, n - 28) % 4}"))
    ahead, seen, moved = Ahead(LIMIT, certain([8_000], 1_000, LIMIT).beyond[0]), [], 0
    for _ in range(4):
        for n in range(8):
            placement.acquire(Request(f"short-{n}", f"short-{n}", response_tokens=5, replica="r3"))
            placement.release(f"short-{n}", "r3", 5)
        watched = placement.watched()
        seen += watched
        moved += len(placement.moves({name: Progress(1_000, 7_000, 7_000, ahead) for name in watched}))
    assert placement.errors == 0, placement.last_error
    assert sorted(seen) == sorted(f"p{n}-0" for n in range(40))
    assert moved


def test_a_cache_that_will_be_full_takes_no_more():
    """Room is counted at the peak that is expected, not by what is there at the beginning."""
    placement = fleet("makespan", 1, ReplicaCost(COST.step, slots=64, room=100_000))
    found = placement.place(known([10_000] * 20))
    assert 10 <= sum(replica is not None for replica in found) <= 11, "to within a cell of the tokens"
    assert placement.errors == 0
    assert not placement.due()
    placement.release("p0-0", "r0", 10_000)
    assert not placement.due(), "how far the others are is not known"
    left = {f"p{n}-0": Progress(9_000, 1_000, 1_000, Ahead(LIMIT, certain([1000], 0, LIMIT).beyond[0])) for n in (1, 2)}
    assert list(placement.moves(left)) == []
    assert placement.due()


def test_known_lengths_are_packed_long_ones_among_few():
    cost = ReplicaCost(COST.step, slots=512, room=10**7)
    placement = fleet("makespan", 4, cost)
    lengths = np.array([20_000] * 8 + [8_000] * 300)
    where = dict(zip(range(len(lengths)), placement.place(known(lengths)), strict=True))
    assert None not in where.values()
    with_long = {where[n] for n in range(8)}
    assert len(with_long) < 4, "or all replicas would take the steps of the longest"
    beside = max(sum(where[n] == r for n in range(8, 308)) for r in with_long)
    assert beside < 300 / 4
    assert placement.policy.seconds().max() < 0.9 * (cost.together(20_000, 640_000, 2.8e9))


def test_what_a_crowd_may_hold_counts_not_its_mean():
    """Means are 2,000 each; one of forty that get to 20,000 by a chance of 5% is nearly sure to."""
    placement = fleet("makespan", 2, ReplicaCost(COST.step, slots=64, room=10**7))
    risky, steady = maybe(0.05, 1053, LIMIT), maybe(0.0, 2000, LIMIT)
    width = np.diff(edges(LIMIT))
    assert float(risky.beyond @ width) == pytest.approx(2000, rel=0.01)
    for n in range(40):
        ahead, at = (risky, "r0") if n % 2 else (steady, "r1")
        placement.acquire(Request(f"p{n}-0", f"p{n}", response_tokens=2000, replica=at, ahead=ahead))
    seconds = dict(zip(placement.fleet.names, placement.policy.seconds(), strict=True))
    assert seconds["r0"] > 3 * seconds["r1"]


def test_a_move_has_to_save_more_than_it_costs():
    def moved(prefill, migrate=True):
        cost = ReplicaCost(COST.step, prefill, slots=64, room=10**7)
        placement = fleet("makespan", 2, cost, migrate=migrate, gain=1e-3)
        requests = known([4_000] * 30)
        for request in requests:
            placement.acquire(request._replace(replica="r0"))
        placement.release("p0-0", "r0", 4000)
        for name in range(1, 10):
            placement.release(f"p{name}-0", "r0", 4000)
        before = placement.policy.seconds().max()
        watched = placement.watched()
        assert bool(watched) == migrate
        ahead = Ahead(LIMIT, certain([4_000], 2_000, LIMIT).beyond[0])
        moves = placement.moves({r.id: Progress(2_000, 2_000, 2_000, ahead) for r in requests[10:]})
        assert placement.errors == 0, placement.last_error
        assert all(move.replica == "r1" and "saves" in move.reason for move in moves)
        assert not moves or placement.policy.seconds().max() < before
        return len(moves)

    assert 0 < moved(prefill=1e-6) <= 10, "half of them, one by one"
    assert moved(prefill=1.0) == 0
    assert moved(prefill=1e-6, migrate=False) == 0


FEWEST = "of 10, longest first: where the fewest tokens were"
REASONS = {
    "longest_first": {
        "p0-0": f"about 20,000 tokens expected, its prompt in tenth 1 {FEWEST}",
        "p9-1": f"about 400 tokens expected, its prompt in tenth 10 {FEWEST}",
    },
    "skewness_aware": {
        "p0-0": "pool 1 of 2 in step 0, 20,000 tokens or more expected: {long} of 4 replicas",
        "p9-1": "pool 2 of 2 in step 0, 400 tokens or more expected: {short} of 4 replicas",
    },
    "histopipe": {"p0-0": "length group 4 of 4 in step 0, on {long} replicas"},
}


@pytest.mark.parametrize("policy", REASONS)
def test_why_a_sample_is_where_it_is(policy):
    placement = fleet(policy)
    where = place(placement, [19_600.0, 18_000.0] + [420.0] * 8)
    prompts = {"long": range(2), "short": range(2, 10)}
    counts = {pool: len({where[f"p{n}-{s}"] for n in among for s in range(2)}) for pool, among in prompts.items()}
    for name, reason in REASONS[policy].items():
        assert placement.reason(name) == reason.format(**counts)
    placement.acquire(Request("late-0", "late"))
    assert "in no plan" in placement.reason("late-0")
    assert placement.reason("nobody-0") == ""


def test_makespan_says_which_plan_a_sample_is_of_and_how_its_replica_compares():
    packed = fleet("makespan", 4, ReplicaCost(COST.step, slots=512, room=10**7))
    packed.place(known([20_000] * 8 + [8_000] * 300))
    assert packed.reason("p0-0").startswith("packed with its like, the longest on few replicas: about 20,000 tokens")
    shares = {packed.reason(f"p{n}-0").rpartition("replica takes ")[2] for n in range(308)}
    assert "100% of the slowest's time" in shares
    assert len({packed.reason(f"p{n}-0") for n in range(308)}) < 8, "reasons can be counted"

    spread = fleet("makespan", 2)
    spread.place(known([3_300, 950]))
    assert spread.reason("p0-0").startswith("spread, where all is done first: about 3,000 tokens to come")
    spread.acquire(Request("late-0", "late", response_tokens=12))
    assert spread.reason("late-0").startswith("in no plan, where all was done first: about 10 tokens to come")
    spread.add("r2")
    assert spread.reason("p1-0").endswith("% of the slowest's time"), "with replicas that came since"


def test_reasons_cost_next_to_nothing():
    placement = fleet("makespan", 64, ReplicaCost(COST.step, slots=512, room=10**9))
    placement.place(known([1000, 2000] * 10_000))
    began = time.process_time()
    told = {placement.reason(f"p{n}-0") for n in range(20_000)}
    assert (time.process_time() - began) / 20_000 < 30e-6, "3 us where nothing else runs"
    assert len(told) < 20


def groups_of(samples, lengths):
    """Requests of prompts whose samples have these lengths, the longest prompt first."""
    rows = certain(lengths, 0, LIMIT).beyond
    return [
        Request(f"p{n}-{s}", f"p{n}", s, 0, samples, 0, int(tokens), ahead=Ahead(LIMIT, row))
        for n, (tokens, row) in enumerate(zip(lengths, rows, strict=True))
        for s in range(samples)
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(1, 12), st.integers(2, 9), st.floats(0.05, 0.9))
def test_siblings_are_kept_in_pairs_where_that_gains(samples, prompts, replicas, gain):
    """Of even prompts nobody is alone, of odd ones hardly anybody; pairs are spread as far as that goes."""
    placement = fleet("makespan", replicas, ReplicaCost(COST.step, slots=256, room=10**7), sibling_gain=gain)
    requests = groups_of(samples, [4_000] * prompts)
    found = dict(zip((r.id for r in requests), placement.place(requests), strict=True))
    assert placement.errors == 0, placement.last_error
    where = [[found[f"p{n}-{s}"] for s in range(samples)] for n in range(prompts)]
    beside = sum(each.count(replica) > 1 for each in where for replica in each)
    unaware = fleet("makespan", replicas, ReplicaCost(COST.step, slots=256, room=10**7))
    there = dict(zip((r.id for r in requests), unaware.place(requests), strict=True))
    others = [[there[f"p{n}-{s}"] for s in range(samples)] for n in range(prompts)]
    assert beside >= sum(each.count(replica) > 1 for each in others for replica in each)
    if prompts * samples >= 4 * replicas:
        # A pair more or less hardly unbalances; three of an odd prompt may, and one of them is then alone.
        assert prompts * samples - beside <= (replicas - 1 if samples % 2 else 0)
    for name, replica in found.items():
        placement.release(name, replica, 7)
    assert not placement.policy._together
    assert np.allclose(placement.policy.seconds(), 0, atol=1e-6)


def test_one_whose_prompt_nobody_knows_is_nobodys_sibling():
    placement = fleet("makespan", 4, sibling_gain=0.5)
    found = placement.place([request._replace(key="") for request in known([4_000] * 4)])
    assert sorted(found) == ["r0", "r1", "r2", "r3"]


def test_a_move_away_from_a_sibling_has_to_save_more():
    def moved(keys, gain):
        cost = ReplicaCost(COST.step, 1e-6, slots=64, room=10**7)
        placement = fleet("makespan", 2, cost, gain=1e-3, sibling_gain=gain)
        requests = [r._replace(key=keys(n)) for n, r in enumerate(known([4_000] * 24))]
        for n, request in enumerate(requests):
            placement.acquire(request._replace(replica="r0" if n < 14 else "r1"))
        ahead = Ahead(LIMIT, certain([4_000], 2_000, LIMIT).beyond[0])
        moves = placement.moves({r.id: Progress(2_000, 2_000, 2_000, ahead) for r in requests})
        assert placement.errors == 0, placement.last_error
        return len(moves)

    assert moved(str, 0.4) == moved(str, 0.0) == moved(lambda n: str(n // 2), 0.0) > 0, "nobody has a sibling"
    assert moved(lambda n: str(n // 2), 0.4) == 0, "both of a pair are at one replica"
    assert moved(lambda n: str(n % 7), 0.4) > 0, "where a sibling is, too"


def test_a_hundred_thousand_that_come_together_are_planned_in_a_second():
    placement = fleet("makespan", 1024, ReplicaCost(COST.step, slots=256, room=690_000))
    placement.policy.coming(known([100, 200]))  # compiled before
    rng = np.random.default_rng(0)
    requests = known(np.sort(rng.lognormal(7.8, 1, 100_000).clip(1, LIMIT).astype(int))[::-1])
    began = time.process_time()
    placement.policy.coming(requests)
    assert time.process_time() - began < 2, "a second, and as much again for a machine that others use"
    assert placement.policy._coming[requests[0].id][1].shape == (2, CELLS)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("makespan", {"gain": 0.0}),
        ("makespan", {"sibling_gain": 1.0}),
        ("makespan", {"sibling_gain": -0.1}),
        ("histopipe", {"groups": 0}),
        ("histopipe", {"tail": 0.0}),
        ("skewness_aware", {"tail": 1.0}),
        ("skewness_aware", {"pools": 1}),
        ("skewness_aware", {"pools": 3}),
        ("skewness_aware", {"objective": "mean"}),
    ],
)
def test_options_that_cannot_be_are_refused(policy, options):
    with pytest.raises(ValueError, match=f"{policy}: .*must be"):
        Placement(policy, options)


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_step_of_a_hundred_thousand_prompts_on_a_thousand_replicas(policy):
    """Seconds are generous: what is looked for is a cost that grows with prompts times replicas."""
    placement = fleet(policy, 1024)
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.lognormal(7.8, 1, 100_000).clip(1, 20_480))[::-1]
    prompts = loads(lengths.tolist(), samples=1)
    began = time.process_time()
    placement.plan(0, prompts)
    planned = time.process_time() - began
    for n, tokens in enumerate(lengths[:5000].tolist()):
        placement.acquire(Request(f"p{n}-0", f"p{n}", 0, 0, 1, 100, int(tokens)))
    assert planned < 1
    assert (time.process_time() - began - planned) / 5000 < 1e-3, "makespan's, one by one: 0.3 ms, 0.6 beside others"
    assert placement.errors == 0
