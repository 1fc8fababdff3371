"""Placement under any order of events: counts, and the cost of a failing policy."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import examples
from verl_rhyme.placement import POLICIES, Load, NoReplica, Placement, Request


def fleet_of(replicas, policy="least_loaded", **options):
    placement = Placement(policy, options)
    for i in range(replicas):
        placement.fleet.add(f"10.0.0.{i}:8000")
    return placement


EVENTS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 5), st.one_of(st.none(), st.integers(1, 3000))),
    st.tuples(st.just("remove"), st.integers(0, 5)),
    st.tuples(st.just("release"), st.integers(0, 30)),
    st.tuples(st.just("plan"), st.integers(0, 3), st.lists(st.one_of(st.none(), st.floats(1, 20_000)), max_size=5)),
    st.tuples(st.just("forget"), st.integers(1, 5)),
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
    placement, running, there = Placement(policy), {}, set()
    fleet = placement.fleet
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
            running[request.id] = request, replica  # an earlier attempt at the sample counts no more
        elif event == "release":
            placement.release(str(args[0]))
            running.pop(str(args[0]), None)
        elif event == "plan" and there:
            step, lengths = args
            placement.plan(step, [Load(f"p{n}", 2, tokens, 100) for n, tokens in enumerate(lengths, 1)])
        elif event == "forget":
            placement.forget_prompts([f"p{args[0]}"])
        elif event == "add":
            there.add(f"r{args[0]}")
            fleet.add(f"r{args[0]}", args[1])
        elif event == "remove" and f"r{args[0]}" in there:
            name = f"r{args[0]}"
            there.remove(name)
            placement.remove(name)
            running = {sample: run for sample, run in running.items() if run[1] != name}
        assert set(fleet.names) == there
        for name in there:
            here = [request for request, replica in running.values() if replica == name]
            assert fleet.requests[fleet.index[name]] == len(here)
            assert fleet.tokens[fleet.index[name]] == sum(request.tokens for request in here)
        assert {sample: placement.replica(sample) for sample in running} == {s: at for s, (_, at) in running.items()}
    assert placement.errors == 0, placement.last_error
    for sample in running:
        placement.release(sample)
    assert not fleet.requests.any()
    assert not fleet.tokens.any()


def test_least_loaded_is_even():
    placement = fleet_of(4, seed=1)
    where = [placement.acquire(Request(str(i), "p")) for i in range(40)]
    assert set(Counter(where).values()) == {10}
    placement.release("0")
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
    for i in range(30):
        placement.release(str(i))
    placement.remove(where[0])
    assert not placement.fleet.requests.any()
