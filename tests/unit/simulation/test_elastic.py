"""Replicas that come and go in a run: none of its samples is lost, and as many serve as the lengths ask for."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from verl_rhyme.scheduling.allocation.elastic import Limits
from verl_rhyme.scheduling.cost import ReplicaCost, StepCost, TrainingCost
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.simulation.elastic import ElasticFleet, add, remove
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Scenario, Step
from verl_rhyme.simulation.workload import Prompt

FAST = ReplicaCost(StepCost(base=2e-3, row=5e-4, cached=1e-7), slots=64)
SLOW = ReplicaCost(StepCost(base=6e-3, row=5e-4, cached=1e-7), slots=64)
PROMPTS, SAMPLES = 8, 8


def simulation(prompts, replicas=(FAST,) * 3, update=15.0, **other):
    rules = Rules(PROMPTS, PROMPTS * SAMPLES, take="loaded", separate=True, relayed=True)
    training = TrainingCost(update=update)
    scenario = Scenario(replicas, rules, training, colocated=False, forecasts="none", response_limit=8192, **other)
    return Simulation(scenario, prompts)


def world(means, rng):
    """A batch of prompts for each mean length."""
    for step, mean in enumerate(means):
        for i in range(PROMPTS):
            lengths = np.exp(rng.normal(np.log(mean), 0.3, SAMPLES)).clip(1, 8000).astype(np.int64)
            yield Prompt(f"{step}-{i}", 0, 20, lengths)


@pytest.mark.parametrize("spares", [(FAST,) * 6, (SLOW,) * 6])
def test_replicas_come_as_responses_grow_and_go_as_they_shrink(spares):
    """Also replicas whose steps have a higher floor."""
    means = [1000.0] * 10 + list(np.linspace(1000, 2400, 25)) + [2400.0] * 10
    means += list(np.linspace(2400, 1000, 25)) + [1000.0] * 30
    run = simulation(list(world(means, np.random.default_rng(0))), update=20.0)
    fleet = ElasticFleet(run, spares, Limits(rest=1))
    steps = run.run(fleet.ended)
    assert len(steps) == len(means)
    assert sum(step.samples for step in steps) == len(means) * PROMPTS * SAMPLES
    peak = max(fleet.units)
    assert peak >= fleet.units[8] + 2
    assert fleet.units[-1] < peak
    fixed = simulation(list(world(means, np.random.default_rng(0))), update=20.0).run()
    long = slice(35, 45)
    assert np.mean([s.seconds for s in steps[long]]) < 0.9 * np.mean([s.seconds for s in fixed[long]])


@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_and_goes_each_sample_is_trained_once_and_whole(seed):
    rng = np.random.default_rng(seed)
    prompts = list(world([600.0] * 12, rng))
    run = simulation(prompts, update=1.0)
    names, seen, moved, trained = itertools.count(3), list[int](), list[int](), Counter[int]()

    def change(step: Step) -> None:
        seen.append(len(run.cluster.engines))
        trained.update(run.trained)
        if rng.random() < 0.5:
            add(run, f"replica-{next(names)}", SLOW)
        elif len(run.cluster.engines) > 1:
            moved.append(remove(run, str(rng.choice(list(run.cluster.engines)))))

    steps = run.run(change)
    assert len(steps) == 12
    assert len(set(seen)) > 1
    assert sum(moved)
    assert max(step.staleness_max for step in steps) <= 1
    assert trained == Counter(int(n) for prompt in prompts for n in prompt.lengths)
    made = sum(step.tokens for step in steps)
    assert sum(step.wasted for step in steps) < made


def test_slots_count_while_they_are_there_and_what_a_replica_costs_is_told():
    """Of a request that runs for two seconds beside 64, then 32, then 64 slots."""
    few = ReplicaCost(StepCost(base=0.01), slots=32)
    run = simulation([], replicas=(FAST,))
    account, cluster = run._occupancy, run.cluster
    add(run, "replica-1", few)
    assert run.placement.fleet.costs == [FAST, few]
    account.at(0.0, 1)
    cluster.now = 2.0
    remove(run, "replica-0")
    cluster.now = 4.0
    account.at(4.0, 0)
    assert account.take() == pytest.approx(1 - 4 / (2 * 96 + 2 * 32))


def test_what_is_planned_stays_and_so_does_the_last():
    run = simulation([], replicas=(FAST,))
    with pytest.raises(ValueError, match="the last replica"):
        remove(run, "replica-0")
    with pytest.raises(ValueError, match="placement makespan plans"):
        remove(simulation([], placement="makespan"), "replica-0")
