"""Placement under any order of events: what is counted, what is bounded, what stays together, what moves."""

import math
import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from verl_rhyme.placement import POLICIES, Fleet, LeastLoaded, NoReplica, Placement, Request, StickyGroup
from verl_rhyme.placement.fleet import REQUESTS, TOKENS

FACTOR = 1.25


def fleet_of(replicas, policy="sticky_group", **options):
    placement = Placement(policy, options)
    for i in range(replicas):
        placement.add(f"10.0.0.{i}:8000")
    return placement


def acquire_group(placement, key, samples, told=True):
    return [placement.acquire(Request(f"{key}/{i}", key=key, sample=i, group=samples * told)) for i in range(samples)]


EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 5)),
    st.tuples(st.just("remove"), st.integers(0, 5)),
    st.tuples(st.just("report"), st.integers(0, 5), st.integers(1, 3000)),
    st.tuples(st.just("expect"), st.integers(0, 100)),
    st.tuples(st.just("forget")),
    st.tuples(st.just("release"), st.integers(0, 1000)),
    *[
        st.tuples(
            st.just("acquire"),
            st.integers(0, 30),  # conversation
            st.integers(0, 5),  # prompt, 0 for none
            st.integers(0, 8),  # group
            st.one_of(st.none(), st.integers(0, 500)),
            st.integers(0, 1),
        )
    ]
    * 4,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(100, slow=300), deadline=None)
@given(events=st.lists(EVENTS, max_size=60))
def test_any_order_of_events(policy, events):
    """Counts are those of what runs, a removed replica gets nothing, and all returns to nothing."""
    placement, running, there = Placement(policy, conversations=10), [], set()
    for event, *args in events:
        if event == "acquire":
            conversation, prompt, group, tokens, attempt = args
            key = f"p{prompt}" if prompt else ""
            request = Request(str(conversation), key, -1, attempt, group, 5, tokens)
            if not there:
                with pytest.raises(NoReplica, match="No available servers in load balancer"):
                    placement.acquire(request)
                continue
            replica = placement.acquire(request)
            assert replica in there
            running.append((request, replica))
        elif event == "release" and running:
            of, at = running[args[0] % len(running)]
            running.remove(next(run for run in running if (run[0].id, run[1]) == (of.id, at)))  # the eldest of the name
            assert placement.release(of.id, at)
        elif event == "add":
            there.add(f"r{args[0]}")
            placement.add(f"r{args[0]}")
        elif event == "remove":
            name = f"r{args[0]}"
            assert placement.remove(name) == (name in there)
            there.discard(name)
            gone = [request.id for request, replica in running if replica == name]
            running = [run for run in running if run[1] != name]
            assert not any(placement.release(request_id, name) for request_id in gone)
        elif event == "report":
            placement.report(f"r{args[0]}", args[1])
        elif event == "expect":
            placement.expect(args[0], more=bool(args[0] % 2))
        elif event == "forget":
            placement.forget()
        status = placement.status()
        assert status["requests"] == {name: sum(r == name for _, r in running) for name in status["requests"]}
        assert sum(status["tokens"].values()) == sum(request.tokens for request, _ in running)
        assert set(status["requests"]) == there
        assert (placement.fleet.reserved >= 0).all()
    assert placement.errors == 0, placement.last_error
    for request, replica in running:
        assert placement.release(request.id, replica)
        assert not running or not placement.release("nobody", replica)
    assert not placement.fleet.running.any()
    assert not placement.fleet.reserved.any()
    assert placement.fleet.totals == placement.fleet.reserved_totals == [0, 0]
    assert not placement._running
    assert len(placement._conversations) <= 10
    if policy == "sticky_group":
        assert len(placement.policy) == 0


@settings(max_examples=examples(100, slow=300), deadline=None)
@given(
    replicas=st.integers(1, 7),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 6)), max_size=150),
)
def test_no_replica_is_given_more_requests_than_the_bound(replicas, events):
    placement, running = fleet_of(replicas), []
    for number, (come, prompt, group) in enumerate(events):
        if come or not running:
            kept = placement.fleet.reserved_totals[REQUESTS]
            request = Request(str(number), f"p{prompt}", group=group)
            replica = placement.acquire(request)
            running.append((request, replica))
            known = len(running) + kept + group  # what runs, and no more than this on its way
            most = math.ceil(FACTOR * known / replicas - 1e-9)
            if not any(r.group for r, _ in running):
                most = math.ceil(FACTOR * len(running) / replicas - 1e-9)
            assert placement.status()["requests"][replica] <= most
        else:
            request, replica = running.pop(prompt % len(running))
            placement.release(request.id, replica)


@settings(max_examples=examples(100, slow=300), deadline=None)
@given(replicas=st.integers(1, 7), tokens=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1000)), max_size=100))
def test_no_replica_is_given_more_tokens_than_the_bound_where_it_can_be_held(replicas, tokens):
    placement = fleet_of(replicas)
    for number, (prompt, length) in enumerate(tokens):
        before = placement.fleet.running[TOKENS].copy()
        replica = placement.acquire(Request(str(number), f"p{prompt}", response_tokens=length))
        most = FACTOR * (before.sum() + length) / replicas
        given = placement.fleet.running[TOKENS, placement.fleet.index[replica]]
        if before.min() + length <= most:
            assert given <= most + 1e-6
        else:
            assert given == before.min() + length


def test_the_bound_follows_capacity():
    placement = fleet_of(2)
    small, large = placement.fleet.names
    placement.report(small, 1_000_000)
    placement.report(large, 3_000_000)
    placement.expect(4000)
    for number in range(4000):
        placement.acquire(Request(str(number), f"p{number // 8}"))
    requests = placement.status()["requests"]
    assert requests[large] == pytest.approx(3000, abs=200)  # the homes are spread so, the bound alone allows 3,750
    assert requests[small] <= math.ceil(FACTOR * 1000)


def test_a_replica_without_room_is_avoided():
    placement = fleet_of(2)
    full, free = placement.fleet.names
    for name in (full, free):
        placement.report(name, 1000)
    placement.expect(20)
    for number in range(3):
        placement.acquire(Request(f"fill{number}", "p", response_tokens=300))
    placed = Counter(placement.acquire(Request(str(n), "p", response_tokens=200)) for n in range(5))
    assert max(placement.status()["tokens"].values()) <= 1000
    assert sum(placed.values()) == 5


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("replicas", "told"), [(2, True), (32, True), (32, False)])
def test_siblings_are_together_when_load_permits(replicas, told, interleaved):
    """8,192 samples, told how many will come; with their group's size no prompt is split, without it few are."""
    placement, prompts, samples = fleet_of(replicas), 512, 16
    placement.expect(prompts * samples)
    order = [(p, s) for p in range(prompts) for s in range(samples)]
    if interleaved:
        random.Random(0).shuffle(order)
    where = defaultdict(set)
    for p, s in order:
        where[p].add(placement.acquire(Request(f"{p}/{s}", f"p{p}", s, group=samples * told)))
    whole = sum(len(on) == 1 for on in where.values()) / prompts
    assert placement.status()["request_imbalance"] <= FACTOR + replicas / (prompts * samples)
    assert whole > 0.97 if told else whole > 0.6
    assert max(len(on) for on in where.values()) <= (2 if told else 3)


def test_what_does_not_fit_moves_on_together():
    placement = fleet_of(4)
    placement.expect(64)
    homes = defaultdict(list)
    for number in range(1000):
        key = f"p{number}"
        homes[StickyGroup.choose(placement.policy, Request("x", key))].append(key)
    keys = homes[placement.fleet.names[0]][:4]  # all of one home, which may have 20
    where = {key: Counter(acquire_group(placement, key, 16)) for key in keys}
    assert all(len(on) == 1 for on in where.values())
    assert max(placement.status()["requests"].values()) <= 20


def test_a_conversation_stays_where_it_was_and_its_siblings_come_there():
    placement = fleet_of(8)
    placement.expect(1000)
    first = placement.acquire(Request("a", "p"))
    assert placement.release("a", first)
    assert placement.acquire(Request("a", "p", attempt=1)) == first
    assert placement.acquire(Request("b", "p", sample=1)) == first
    assert placement.acquire(Request("a", "named otherwise", attempt=2)) == first  # the conversation has its key
    assert len(placement.policy) == 1


def test_what_is_announced_adds_to_what_has_not_come():
    """A coordinator starts samples in lots, a large one first: the small ones after it do not take its place."""
    placement = fleet_of(32)
    placement.expect(8192)
    placement.expect(16, more=True)
    groups = [acquire_group(placement, f"p{i}", 16) for i in range(512)]
    assert all(len(set(replicas)) == 1 for replicas in groups)
    placement.expect(3)
    assert placement.fleet.expected == 3


def test_a_turn_reserves_no_room_for_siblings():
    """They are long gone: what an agent loop sends with each of its turns holds for the first."""
    placement = fleet_of(4)
    placement.release("a", placement.acquire(Request("a", "p", group=16)))
    assert placement.fleet.reserved_totals == [0, 0]
    placement.acquire(Request("a", "p", attempt=1, group=16))
    assert placement.fleet.reserved_totals == [0, 0]
    placement.acquire(Request("b", "p", attempt=1, group=16))
    assert max(placement.status()["requests"].values()) == 1  # nor is the bound that of a group


def test_conversations_are_remembered_up_to_a_bound():
    placement = Placement("least_loaded", conversations=3)
    placement.add("a")
    for i in range(9):
        placement.release(str(i), placement.acquire(Request(str(i))))
    assert placement.forget() == 3


def test_a_replica_takes_all_runs_of_a_name_with_it():
    placement = fleet_of(1)
    for _ in range(3):
        placement.acquire(Request("a", "p"))
    placement.remove("10.0.0.0:8000")
    assert len(placement.policy) == len(placement._running) == 0


def test_room_kept_on_a_replica_goes_with_it():
    placement = fleet_of(2)
    placement.expect(40)
    home = placement.acquire(Request("a", "p", group=4))
    other = next(name for name in placement.fleet.names if name != home)
    placement.policy.started(Request("b", "p", attempt=1), other)  # a sibling that runs elsewhere holds the group
    placement.remove(home)
    placement.add(home)
    for i in range(3):
        placement.acquire(Request(f"c{i}", "p", group=4))
    assert (placement.fleet.reserved >= 0).all()
    assert placement.fleet.reserved_totals[REQUESTS] == placement.fleet.reserved[REQUESTS].sum()
    assert placement.errors == 0


@settings(max_examples=10, deadline=None)
@given(replicas=st.integers(2, 20), seed=st.integers(0, 1 << 30))
def test_a_fair_share_of_homes_moves_and_no_other(replicas, seed):
    placement, keys = fleet_of(replicas), [f"{seed}/{i}" for i in range(500)]
    placement.expect(10**9)

    def homes():
        return {key: placement.policy.choose(Request("x", key)) for key in keys}

    before = homes()
    placement.add("new")
    grown = homes()
    moved = {key for key in keys if grown[key] != before[key]}
    assert {grown[key] for key in moved} <= {"new"}
    assert len(moved) <= 500 / (replicas + 1) + 5 * math.sqrt(500 / (replicas + 1))
    assert moved
    gone = placement.fleet.names[0]
    placement.remove(gone)
    shrunk = homes()
    assert all((shrunk[key] != grown[key]) == (grown[key] == gone) for key in keys)
    placement.add(gone)
    placement.remove("new")
    assert homes() == before


def test_homes_are_the_same_in_every_process():
    placement = fleet_of(8)
    placement.expect(100)
    homes = [placement.acquire(Request(str(i), f"p{i}")).split(":")[0][-1] for i in range(8)]
    assert "".join(homes) == "14477322"


def test_a_later_epoch_comes_home():
    placement, home = fleet_of(16), {}
    for epoch in range(3):
        keys = [f"p{i}" for i in range(400)]
        random.Random(epoch).shuffle(keys)
        placement.expect(400 * 8)
        where = {key: acquire_group(placement, key, 8) for key in keys}
        if epoch:
            assert sum(where[key][0] == home[key] for key in keys) > 0.8 * 400
        home = {key: on[0] for key, on in where.items()}
        for key, on in where.items():
            for i, replica in enumerate(on):
                placement.release(f"{key}/{i}", replica)


def test_least_loaded_is_even_and_sticky_as_verls_is():
    placement = fleet_of(4, "least_loaded", seed=1)
    where = [placement.acquire(Request(str(i), "p")) for i in range(40)]
    assert set(Counter(where).values()) == {10}
    assert placement.release("0", where[0])
    assert placement.acquire(Request("1", "p")) == where[1]  # sticky, though another has fewer
    assert placement.acquire(Request("new", "p")) == where[0]
    placement.remove(where[1])
    assert placement.acquire(Request("1", "p")) != where[1]


class Faulty:
    def __init__(self, fleet, how):
        self.how = how

    def choose(self, request):
        if self.how == "raises":
            raise RuntimeError("no idea")
        return self.how

    def started(self, *about):
        if self.how == "raises":
            raise RuntimeError("nor now")

    released = removed = forget = started


@pytest.mark.parametrize("how", ["raises", "elsewhere", 7, ["unhashable"], None])
def test_a_policy_that_fails_costs_no_request(monkeypatch, how):
    monkeypatch.setitem(POLICIES, "faulty", Faulty)
    placement = fleet_of(3, "faulty", how=how)
    where = [placement.acquire(Request(str(i), "p")) for i in range(30)]
    assert set(Counter(where).values()) == {10}
    assert placement.errors >= 30
    for i, replica in enumerate(where):
        assert placement.release(str(i), replica)
    placement.forget()
    assert placement.remove(where[0])
    assert not placement.fleet.running.any()


def test_a_group_that_fell_back_is_still_counted_out():
    placement = fleet_of(3)
    choose, placement.policy.choose = placement.policy.choose, None
    where = acquire_group(placement, "p", 6)
    placement.policy.choose = choose
    where.append(placement.acquire(Request("p/6", "p")))
    for i, replica in enumerate(where):
        assert placement.release(f"p/{i}", replica)
    assert len(placement.policy) == 0
    assert not placement.fleet.reserved.any()
    assert placement.errors == 6


def test_a_policy_that_is_not_there_is_told():
    with pytest.raises(ValueError, match=r"least_loaded, .*sticky_group"):
        Placement("stick_group")
    with pytest.raises(ValueError, match=r"above 1.*1\.25"):
        Placement("sticky_group", {"factor": 1.0})
    with pytest.raises(ValueError, match="room for 0 KV tokens"):
        fleet_of(1).report("10.0.0.0:8000", 0)


def test_the_fleet_finds_the_least():
    fleet = Fleet()
    for name in "abc":
        fleet.add(name)
    fleet.run("b", 2, 10)
    assert [fleet.names[i] for i in fleet.least()] == ["a", "c"]
    assert fleet.imbalance(REQUESTS) == pytest.approx(3.0)
    assert LeastLoaded(fleet, seed=0).choose(Request("x")) in ("a", "c")
