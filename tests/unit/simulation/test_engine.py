"""The engine in virtual time against a reference that computes every step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.planning.cost import ReplicaCost, StepCost
from verl_rhyme.simulation.engine import Engine, Request, Segment

STEP = StepCost(base=0.01, row=0.001, cached=1e-6, draft=0.0005, drafting=0.002, waiting=0.0003)


def run(engine: Engine) -> list[tuple[object, float]]:
    """Run an engine until it is idle; return the requests with their end times."""
    done = []
    while (now := engine.next_event()) < math.inf:
        done += [(request.name, now) for request in engine.step(now)]
    assert not engine.waiting
    return done


def every_step(requests: list[Request], cost: ReplicaCost) -> dict[object, float]:
    """Return the end times if every step is computed: requests come at time 0, and the cache is unbounded. The cache of
    a step is that in the middle of the step."""
    now, waiting, running, done = 0.0, list(requests), {}, {}
    seen: set[object] = set()
    while waiting or running:
        while waiting and len(running) < cost.slots:
            request = waiting.pop(0)
            now += cost.prefill * (0 if request.prompt in seen else request.prompt_tokens)
            seen.add(request.prompt)
            running[request.name] = [request, 0.0]
        prompts = {request.prompt: request.prompt_tokens for request, _ in running.values()}
        cached = sum(prompts.values()) + sum(had + request.pace / 2 for request, had in running.values())
        now += cost.step.seconds(len(running), cached, sum(request.drafts for request, _ in running.values()))
        for name, (request, had) in list(running.items()):
            running[name][1] = had + request.pace
            if had + request.pace >= request.tokens:
                done[name] = now
                del running[name]
    return done


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60)), min_size=1, max_size=30),
    st.integers(1, 9),  # more rows would run without drafts
    st.sampled_from([1.0, 2.0]),
)
def test_end_times_equal_the_reference(wanted, slots, pace):
    cost = ReplicaCost(STEP, prefill=1e-4, slots=slots)
    requests = [
        Request(i, prompt, 10 + prompt, tokens * pace, pace=pace, drafts=3 * (pace > 1))
        for i, (prompt, tokens) in enumerate(wanted)
    ]
    engine = Engine(cost)
    for request in requests:
        engine.submit(request, 0.0)
    done, expected = dict(run(engine)), every_step(requests, cost)
    assert done == {name: pytest.approx(at, rel=1e-6) for name, at in expected.items()}
    assert engine.made == pytest.approx(sum(request.tokens for request in requests))
    assert engine.cached == 0


def test_drafts_that_would_lose_are_not_verified():
    """As ``drafting.weigh_cost`` decides: with them a step of two tokens would take longer than two steps."""
    costly = ReplicaCost(StepCost(base=0.01, row=0.001, cached=1e-4, draft=0.02), slots=8)
    ends = []
    for pace, drafts in ((2.0, 4.0), (1.0, 0.0)):
        engine = Engine(costly)
        for i in range(4):
            engine.submit(Request(i, i, 0, 40, pace=pace, drafts=drafts), 0.0)
        ends.append([at for _, at in run(engine)])
    assert ends[0] == pytest.approx(ends[1], rel=0.02)  # of a step of two tokens, the cache is that of its middle


def test_a_full_cache_preempts_the_request_admitted_last():
    segments: list[Segment] = []
    engine = Engine(ReplicaCost(STEP, slots=8, room=100), segments.append)
    for i in range(4):
        engine.submit(Request(i, i, 10, 40), 0.0)
    most, done = 0.0, []
    while (now := engine.next_event()) < math.inf:
        done += [request.name for request in engine.step(now)]
        most = max(most, engine.cached)
    assert sorted(done) == [0, 1, 2, 3]
    assert done[:2] == [0, 1], "requests admitted first were preempted"
    assert engine.preempted >= 2
    assert {s.request.name for s in segments if s.reason == "preempted"} == {2, 3}
    assert most <= 100 + 1e-6
    assert engine.made == pytest.approx(160), "preempted requests lost tokens"
    engine.submit(Request("huge", 0, 10, 400), 1e3)
    engine.submit(Request("small", 1, 10, 5), 1e3)
    assert [name for name, _ in run(engine)] == ["small", "huge"], "the larger one runs alone"


def test_a_withdrawn_request_continues_elsewhere_with_its_tokens():
    here, there = (Engine(ReplicaCost(STEP, prefill=1e-3, slots=1)) for _ in range(2))
    for i in range(3):
        here.submit(Request(i, "p", 100, 50), 0.0)
    now = here.cost.prefill * 100 + 20.5 * STEP.seconds(1, 110)
    assert here.withdraw(2, now)[1] == 0
    _, emitted = here.withdraw(0, now)
    assert emitted == pytest.approx(20.5, rel=0.01)
    there.submit(Request(0, "p", 100, 50, emitted=emitted), now)
    ends = dict(run(there))
    assert ends[0] > now + there.cost.prefill * 120, "the prefix was not recomputed"
    assert here.made + there.made == pytest.approx(50)
    assert [name for name, _ in run(here)] == [1]
    for i in range(2):
        here.submit(Request(i, i, 10, 10), 1e3)
    taken = here.withdraw_all(1e3 + 1.05)
    assert [(request.name, emitted > 0) for request, emitted in taken] == [(0, True), (1, False)]
    assert (here.running, here.waiting, here.cached) == (0, 0, 0)


def test_lower_priority_numbers_go_first():
    engine = Engine(ReplicaCost(STEP, slots=1))
    for name, priority in ((0, 5), (1, 3), (2, 4), (3, 3)):
        engine.submit(Request(name, name, 1, 5, priority=priority), 0.0)
    assert [name for name, _ in run(engine)] == [0, 1, 3, 2]


@pytest.mark.parametrize("change", [{"base": -1.0}, {"base": 0.0}, {"base": 1.0, "row": math.inf}])
def test_invalid_costs_raise(change):
    with pytest.raises(ValueError, match=r"step\."):
        StepCost(**change)
    with pytest.raises(ValueError, match="slots"):
        ReplicaCost(STEP, slots=0)


@pytest.mark.parametrize(("host", "found"), [(0.0, 41), (1e6, 41 + 90)])
def test_a_context_waits_in_the_cache_until_room_is_needed(host, found):
    """A returning turn prefills only what is new; of an evicted context all, unless host memory has it."""
    segments: list[Segment] = []
    engine = Engine(ReplicaCost(STEP, prefill=1e-3, slots=8, room=400, host=host), segments.append)
    engine.submit(Request("a", "p", 100, 50), 0.0)
    run(engine)
    engine.submit(Request("a", "p", 100, 20, context=70), 100.0)  # a tool answered 20 tokens
    run(engine)
    assert (segments[-1].request.cached, engine.prefilled) == (150, 120)
    engine.submit(Request("b", "q", 200, 60), 200.0)  # it evicts 50 of the 90 + 100 tokens that wait
    run(engine)
    engine.submit(Request("c", "q", 200, 99), 300.0)  # and this one all but 41 of the prompt
    run(engine)
    engine.submit(Request("a", "p", 100, 10, context=100), 400.0)
    run(engine)
    assert segments[-1].request.cached == pytest.approx(found)
    engine.forget()
    engine.submit(Request("a", "p", 100, 10, context=100), 500.0)
    run(engine)
    assert segments[-1].request.cached == 0, "new weights kept old caches"
    assert engine.cached == 0
