"""The planner's closed forms against whole simulated runs."""

from __future__ import annotations

import numpy as np
import pytest

from verl_rhyme.scheduling.allocation.times import Overlap, Training, Work, generation, step
from verl_rhyme.scheduling.cost import ReplicaCost, StepCost, TrainingCost
from verl_rhyme.scheduling.rules import Rules, named
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Scenario
from verl_rhyme.simulation.workload import Lengths

LENGTHS = Lengths({50: 250, 90: 900, 99: 1800}, limit=2048)
STEP = StepCost(base=0.01, row=5e-5, cached=1e-7)
PROMPTS, SAMPLES, PROMPT_TOKENS = 16, 8, 40
BATCHES, SYNC = 14, 2.0
#: How far the estimate may be off. Siblings are alike, so that the longest of a batch is shorter than that of as many
#: independent draws: 5 to 11% with the eight samples of these.
TOLERANCE = {"sync": 0.15, "overlapped": 0.12, "drained": 0.15}
OVERLAPS = {"sync": Overlap(0), "overlapped": Overlap(1), "drained": Overlap(1, drains=True)}


def rules(kind: str) -> Rules:
    sizes = {"batch_prompts": PROMPTS, "batch_samples": PROMPTS * SAMPLES}
    if kind == "sync":
        return Rules(**sizes, group_batches=1, through_training=True)
    if kind == "overlapped":
        return named("histopipe", **sizes, through_training=True)
    rolling = {"load": "rolling", "max_staleness": 1, "harvest": "loaded", "on_interrupt": "keep_running"}
    return Rules(**sizes, **rolling, through_training=True, one_by_one=True)


def both(kind: str, cost: ReplicaCost, replicas: int, token: float) -> tuple[float, float]:
    """Seconds of a step, estimated and simulated (after two), of the same lengths."""
    prompts = list(LENGTHS.epochs(PROMPTS * BATCHES, SAMPLES, 1, PROMPT_TOKENS))
    training = TrainingCost(token=token, sync=SYNC)
    scenario = Scenario(
        (cost,) * replicas, rules(kind), training, colocated=False, forecasts="none", response_limit=2048
    )
    steps = Simulation(scenario, prompts).run()[2:]
    lengths = np.concatenate([prompt.lengths for prompt in prompts[2 * PROMPTS :]]).astype(float)
    work = Work(lengths, PROMPTS * SAMPLES, SAMPLES, PROMPT_TOKENS)
    trained = Training(token).seconds(1, work.trained_tokens)
    overlap = OVERLAPS[kind]
    generated = generation([(cost, np.array([replicas]))], work, overlap, float(trained) + SYNC)
    told = float(step(generated, trained, SYNC, 0.0, overlap)[0])
    return told, (steps[-1].ended - steps[0].began) / len(steps)


@pytest.mark.parametrize("kind", OVERLAPS)
@pytest.mark.parametrize(("slots", "room"), [(256, np.inf), (16, np.inf), (256, 6000)])
@pytest.mark.parametrize(("replicas", "token"), [(2, 1e-6), (6, 1e-6), (6, 1e-4)])
def test_a_step_takes_as_long_as_simulated(kind, slots, room, replicas, token):
    told, real = both(kind, ReplicaCost(STEP, prefill=1e-5, slots=slots, room=room), replicas, token)
    assert told == pytest.approx(real, rel=TOLERANCE[kind]), told / real


@pytest.mark.parametrize("kind", ["overlapped", "drained"])
def test_where_training_is_slower_it_is_training(kind):
    told, real = both(kind, ReplicaCost(STEP, slots=256), 6, 1e-3)
    assert told == pytest.approx(real, rel=0.02)
