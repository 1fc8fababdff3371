"""The fit recovers the coefficients of simulated requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.planning.cost import StepCost
from verl_rhyme.planning.cost_fit import LEAST_REQUESTS, FitError, Requests, fit_steps

COST = StepCost(base=0.02, row=4e-4, cached=2e-6, draft=2e-4, drafting=0.004)
PREFILL = 2e-5


def decode(cost, prefill=0.0, count=200, slots=8, seed=0, drafts=True, pause=1.0):
    """Two replicas that take whole steps, one after the other; requests come in bursts, with pauses between."""
    rng = np.random.default_rng(seed)
    rows = []
    for replica in range(2):
        now, waiting, running = 0.0, [], []
        for _ in range(count // 2):
            request = {"replica": replica, "prompt": len(rows), "steps": 0, "made": 0.0}
            request |= {"tokens": int(rng.integers(5, 150)), "prompt_tokens": int(rng.integers(20, 2000))}
            request["pace"] = 2.0 if drafts and (len(rows) // 10) % 2 else 1.0
            rows.append(request)
            waiting.append(request)
        while waiting or running:
            if not running:
                now += pause
                batch = int(rng.integers(1, 3 * slots))  # of this burst
            while waiting and batch and len(running) < slots:
                request, batch = waiting.pop(0), batch - 1
                request["started"] = now
                now += prefill * request["prompt_tokens"]
                request["first_token"] = now
                running.append(request)
            cached = sum(r["prompt_tokens"] + r["made"] for r in running)
            now += cost.seconds(len(running), cached, sum(3.0 * (r["pace"] > 1) for r in running))
            for request in running:
                request["steps"] += 1
                request["made"] += request["pace"]
                request["finished"] = now
            running = [r for r in running if r["made"] < r["tokens"]]

    def column(name, kind=float):
        return np.array([row[name] for row in rows], dtype=kind)

    steps = column("steps")
    return Requests(
        **{name: column(name) for name in ("started", "first_token", "finished", "prompt_tokens")},
        **{name: column(name, np.int64) for name in ("replica", "prompt")},
        own=np.zeros(len(rows)),
        computed=column("prompt_tokens"),
        tokens=column("made"),
        steps=steps,
        drafted=steps * 3 * (column("pace") > 1),
        whole=np.ones(len(rows), dtype=bool),
    )


@settings(max_examples=12)
@given(
    st.builds(
        StepCost,
        base=st.floats(0.005, 0.05),
        row=st.floats(1e-4, 2e-3),
        cached=st.floats(1e-7, 3e-6),
        draft=st.floats(1e-5, 5e-4),
        drafting=st.just(0.0),
    ),
    st.integers(0, 99),
)
def test_known_coefficients_come_back(cost, seed):
    found = fit_steps(decode(cost, PREFILL, count=400, seed=seed))
    assert found.error < 0.02
    for rows, cached, drafts in ((1, 1000, 0), (4, 5000, 0), (8, 9000, 0), (4, 5000, 12), (8, 9000, 24)):
        assert found.step.seconds(rows, cached, drafts) == pytest.approx(cost.seconds(rows, cached, drafts), rel=0.06)


def test_each_coefficient_by_itself():
    found = fit_steps(decode(COST, PREFILL, count=2000))
    for name, value in vars(COST).items():
        assert getattr(found.step, name) == pytest.approx(value, rel=0.05), name
    assert found.prefill == pytest.approx(PREFILL, rel=0.1)


def test_noise_and_requests_that_went_wrong():
    """Ends are reported up to a step late; one request in twenty was preempted, or its machine paused."""
    requests = decode(COST, PREFILL, count=800)
    rng = np.random.default_rng(1)
    late = rng.uniform(0, 0.02, len(requests))
    odd = rng.random(len(requests)) < 0.05
    steps = np.where(odd, requests.steps * rng.uniform(0.2, 0.9, len(requests)), requests.steps)
    found = fit_steps(replace(requests, finished=requests.finished + late, steps=steps))
    for rows, cached in ((2, 2000), (8, 9000)):
        assert found.step.seconds(rows, cached) == pytest.approx(COST.seconds(rows, cached), rel=0.06)
    assert found.error < 0.03


def test_coefficients_without_records_stay_0():
    plain = fit_steps(decode(StepCost(base=0.02, row=4e-4), drafts=False))
    assert plain.step.draft == plain.step.drafting == 0
    alone = fit_steps(decode(StepCost(base=0.02), slots=1, drafts=False))
    assert alone.step.row == 0
    assert alone.step.base == pytest.approx(0.02, rel=0.01)
    cached = replace(decode(COST, drafts=False), computed=np.zeros(200))
    assert fit_steps(cached).prefill == 0


def test_a_coefficient_that_cannot_be_separated_from_the_base_is_dropped():
    """One burst of as many requests as there are slots, all as long: rows and caches hardly vary."""
    requests = decode(StepCost(base=0.02, row=1e-3), count=32, slots=8, drafts=False)
    found = fit_steps(requests.of(np.argsort(-requests.steps)[:20]))
    step = found.step.seconds(8, float(requests.prompt_tokens.mean() * 8))
    assert step == pytest.approx(0.028, rel=0.2)


def test_too_few_are_refused():
    requests = decode(COST, count=LEAST_REQUESTS)
    fit_steps(requests)
    with pytest.raises(FitError, match=f"15 requests .* at least {LEAST_REQUESTS}"):
        fit_steps(requests.of(np.arange(15)))
    with pytest.raises(FitError, match="0 requests"):
        fit_steps(replace(requests, started=np.full(16, np.nan)))
