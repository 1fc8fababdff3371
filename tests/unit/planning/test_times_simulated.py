"""The planner's closed forms and splits against simulated training runs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from verl_rhyme.planning.cost import ReplicaCost, StepCost, TrainingCost
from verl_rhyme.planning.planner import Problem, colocated, plan, split
from verl_rhyme.planning.sites import Model, Pool
from verl_rhyme.planning.times import Training, Work
from verl_rhyme.planning.workload import Lengths
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Scenario

LENGTHS = Lengths({50: 250, 90: 900, 99: 1800}, limit=2048)
STEP = StepCost(base=0.01, row=5e-5, cached=1e-7)
WIDE, NARROW, FULL = (
    ReplicaCost(STEP, prefill=1e-5, slots=slots, room=room)
    for slots, room in ((256, np.inf), (16, np.inf), (256, 6000))
)
MIXTURE = ReplicaCost(StepCost(2e-3, 5e-5, 1e-7, expert=1e-4, experts=128, chosen=8), prefill=1e-5)
FEW = ReplicaCost(MIXTURE.step, prefill=1e-5, slots=16)
PROMPTS, SAMPLES, PROMPT_TOKENS, GPUS = 16, 8, 40, 12
FIRST, COUNTED, SYNC, UPDATE = 4, 10, 2.0, 1.0
MADE = list(LENGTHS.epochs(PROMPTS * (FIRST + COUNTED), SAMPLES, 1, PROMPT_TOKENS))


def problem(cost: ReplicaCost, bound: int, token: float) -> Problem:
    """Return the problem of one node whose GPUs each hold a replica or train."""
    lengths = np.concatenate([prompt.lengths for prompt in MADE[FIRST * PROMPTS :]]).astype(float)
    work = Work(lengths, PROMPTS * SAMPLES, SAMPLES, PROMPT_TOKENS)
    pool = Pool("here", "gpu", GPUS, GPUS, 80e9, None, 0.8, {1: cost}, Training(token, UPDATE))
    return Problem([pool], Model(1e9), work, bound, SYNC)


@cache
def simulated(cost: ReplicaCost, bound: int, token: float, replicas: int, train: int, apart: bool = True) -> float:
    """Return the mean seconds of a step, after the first few."""
    batch = PROMPTS * SAMPLES
    scenario = Scenario(
        (cost,) * replicas,
        Rules(PROMPTS, batch, bound, separate=apart, relayed=apart),
        TrainingCost(token=token / train, update=UPDATE, sync=SYNC),
        batch // 8 if apart else None,
        colocated=not apart,
        placement="longest_first",
        forecasts="none",
        response_limit=2048,
    )
    steps = Simulation(scenario, MADE).run()[FIRST:]
    return (steps[-1].ended - steps[0].began) / len(steps)


@pytest.mark.parametrize(
    ("bound", "cost"), [(0, WIDE), (1, NARROW), (2, FULL), (4, WIDE), (0, MIXTURE), (0, FEW), (1, FEW), (4, MIXTURE)]
)
@pytest.mark.parametrize(("replicas", "token"), [(2, 1e-5), (6, 1.5e-3)])
def test_a_planned_step_takes_as_long_as_simulated(bound, cost, replicas, token):
    """Samples of a prompt are correlated: a batch's longest response is shorter than with independent draws."""
    given = problem(cost, bound, token)
    [pool] = given.pools
    planned = split(given, (pool, 6), (pool, replicas), 1).step
    assert planned == pytest.approx(simulated(cost, bound, token, replicas, 6), rel=0.15)


@pytest.mark.parametrize("bound", [1, 4])
def test_a_planned_colocated_step_takes_as_long_as_simulated(bound):
    given = problem(WIDE, bound, 1.5e-3)
    planned = colocated(given, given.pools[0], GPUS, 1).step
    assert planned == pytest.approx(simulated(WIDE, bound, 1.5e-3, GPUS, GPUS, False), rel=0.15)


@pytest.mark.parametrize(("bound", "cost"), [(1, WIDE), (2, NARROW)])
def test_the_planned_split_is_nearly_the_best_simulated_one(bound, cost):
    token = 3e-3
    took = {n: simulated(cost, bound, token, n, GPUS - n) for n in range(2, GPUS, 2)}
    planned = plan(problem(cost, bound, token)).best
    ours = simulated(cost, bound, token, planned.rollout_gpus, planned.train_gpus)
    assert ours <= 1.05 * min(took.values()), (planned.rollout_gpus, took)
    assert max(took.values()) > 1.2 * min(took.values()), "all splits are equally good: the test is void"
