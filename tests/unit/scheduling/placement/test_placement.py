"""Placement under any order of events: counts, and the cost of a failing policy."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from verl_rhyme.placement import POLICIES, Fleet, NoReplica, Placement, Request


def fleet_of(replicas, policy="least_loaded", **options):
    placement = Placement(policy, options)
    for i in range(replicas):
        placement.add(f"10.0.0.{i}:8000")
    return placement


EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 5)),
    st.tuples(st.just("remove"), st.integers(0, 5)),
    st.tuples(st.just("report"), st.integers(0, 5), st.integers(1, 3000)),
    st.tuples(st.just("release"), st.integers(0, 1000)),
    *[
        st.tuples(
            st.just("acquire"),
            st.integers(0, 30),  # sample
            st.integers(0, 5),  # prompt, 0 for none
            st.one_of(st.none(), st.integers(0, 500)),
            st.integers(-1, 5),  # where it runs already
        )
    ]
    * 4,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(100, slow=300))
@given(events=st.lists(EVENTS, max_size=60))
def test_any_order_of_events(policy, events):
    """Counts match the running requests, a removed replica gets none, and all counts return to zero."""
    placement, running, there = Placement(policy), [], set()
    for event, *args in events:
        if event == "acquire":
            sample, prompt, tokens, at = args
            request = Request(
                str(sample), f"p{prompt}" if prompt else "", 5, tokens, replica=f"r{at}" if at >= 0 else ""
            )
            if not there:
                with pytest.raises(NoReplica, match="No available servers in load balancer"):
                    placement.acquire(request)
                continue
            replica = placement.acquire(request)
            assert replica in there
            assert replica == request.replica or request.replica not in there
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
        fleet = placement.fleet
        assert {name: fleet.requests(name) for name in fleet.names} == {
            name: sum(r == name for _, r in running) for name in there
        }
        assert fleet.totals == [len(running), sum(request.tokens for request, _ in running)]
        assert fleet.running.sum(axis=1).tolist() == fleet.totals
    assert placement.errors == 0, placement.last_error
    for request, replica in running:
        assert placement.release(request.id, replica)
        assert not running or not placement.release("nobody", replica)
    assert not placement.fleet.running.any()
    assert placement.fleet.totals == [0, 0]
    assert not placement._running


def test_least_loaded_is_even():
    placement = fleet_of(4, seed=1)
    where = [placement.acquire(Request(str(i), "p")) for i in range(40)]
    assert set(Counter(where).values()) == {10}
    assert placement.release("0", where[0])
    assert placement.acquire(Request("new", "p")) == where[0]


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

    released = started


@pytest.mark.parametrize("how", ["raises", "elsewhere", 7, ["unhashable"], None])
def test_a_policy_that_fails_costs_no_request(monkeypatch, how):
    monkeypatch.setitem(POLICIES, "faulty", Faulty)
    placement = fleet_of(3, "faulty", how=how)
    where = [placement.acquire(Request(str(i), "p")) for i in range(30)]
    assert set(Counter(where).values()) == {10}
    assert placement.errors >= 30
    for i, replica in enumerate(where):
        assert placement.release(str(i), replica)
    assert placement.remove(where[0])
    assert not placement.fleet.running.any()


def test_shares_follow_capacity():
    fleet = Fleet()
    for name, room in (("small", 1_000), ("large", 3_000)):
        fleet.add(name)
        fleet.report(name, room)
    assert fleet.share.tolist() == [0.25, 0.75]
    fleet.add("unknown")
    assert set(fleet.share) == {1 / 3}
