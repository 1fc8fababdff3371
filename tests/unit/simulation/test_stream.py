"""Simulated training steps whose samples are trained in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.planning.cost import ReplicaCost, StepCost, TrainingCost
from verl_rhyme.planning.workload import Lengths, Prompt
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Scenario, Step

COST = ReplicaCost(StepCost(base=0.01, row=1e-4, cached=1e-7), prefill=1e-5, slots=8)
TRAINING = TrainingCost(token=2e-4, update=1.0, part=0.3, sync=0.5)
BATCH = {"batch_prompts": 8, "batch_samples": 32}


def simulated(
    prompts: list[Prompt], staleness: int = 0, part_samples: int | None = 4, rules: Any = None, **changes: Any
) -> list[Step]:
    """Return the steps of three separate replicas; ``rules`` are further ones."""
    given = {**BATCH, "max_staleness": staleness, "separate": True, "relayed": True, **(rules or {})}
    scenario = {"replicas": (COST,) * 3, "training": TRAINING, "response_limit": 1000, "colocated": False, **changes}
    return Simulation(Scenario(rules=Rules(**given), part_samples=part_samples, **scenario), prompts).run()


def made(seed: int, median: int = 100, spread: float = 9.0, prompts: int = 24) -> list[Prompt]:
    lengths = Lengths({50: median, 99: median * spread}, limit=1000)
    return list(lengths.epochs(prompts, 4, 1, 20, seed=seed))


workloads = st.builds(made, st.integers(0, 99), st.integers(20, 200), st.floats(1.05, 20.0))
sizes = st.integers(1, 40)
#: Also where a version is published before replicas have loaded the previous one.
costs = st.builds(
    TrainingCost,
    *(st.floats(0, high) for high in (1e-3, 3.0, 2.0, 8.0, 0.5)),
    copy=st.none() | st.floats(0, 2),
)


@settings(max_examples=30)
@given(
    workloads,
    st.integers(0, 3),
    sizes,
    costs,
    st.sampled_from(["continue", "finish"]),
    st.sampled_from(["finished", "loaded"]),
)
def test_every_token_is_trained_once_and_within_the_bound(prompts, staleness, size, training, at_version, take):
    rules = {"at_version": at_version if staleness else None, "take": take}
    steps = simulated(prompts, staleness, size, rules, training=training)
    assert [step.version for step in steps] == list(range(3))
    assert sum(step.tokens for step in steps) == sum(int(prompt.lengths.sum()) for prompt in prompts)
    assert sum(step.wasted for step in steps) == 0 or (staleness and at_version == "continue")
    for step in steps:
        assert 0 <= step.staleness_mean <= step.staleness_max <= staleness
        rest = step.tokens + 32 * 20 - sum(part.tokens for part in step.parts)
        least = training.update + training.token * rest + training.blocked_s(one_by_one=True)
        assert step.ended - step.collected == pytest.approx(least, abs=1e-6), "a token was trained twice, or never"
        assert all(part.samples >= min(size, 32) and part.samples % 4 == 0 for part in step.parts)
        assert 0 <= step.early_share <= 1
        borders = [step.began, *(at for part in step.parts for at in part[:2]), step.collected, step.ended]
        assert borders == sorted(borders), "parts overlap each other or the rest of the batch"
        assert step.idle_s >= -1e-9


@settings(max_examples=15)
@given(workloads, sizes, costs)
def test_on_policy_streaming_costs_at_most_the_overhead_of_parts(prompts, size, training):
    """The rollouts are the same, and no sample is trained twice."""
    training = replace(training, copy=None)
    plain, parts = (simulated(prompts, 0, each, training=training) for each in (None, size))
    for before, after in zip(plain, parts, strict=True):
        assert before.tokens == after.tokens
        assert after.seconds <= before.seconds + len(after.parts) * training.part + 1e-6
        assert after.seconds >= before.rollout + training.update + training.sync - 1e-6, "the rollout became shorter"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_single_part_equals_no_streaming(staleness):
    prompts = made(0)
    assert simulated(prompts, staleness, 32) == simulated(prompts, staleness, None)


def test_a_part_and_the_rest_in_closed_form():
    """One request per replica: the first prompt finishes after one second, the second one after three."""
    cost = ReplicaCost(StepCost(base=0.01), slots=1)
    prompts = [Prompt(str(i), 0, 10, np.array([tokens])) for i, tokens in enumerate((100, 300))]
    for token, through, collected, ended in (
        (1e-2, 1 + 0.5 + 1.1, 3.0, 3.0 + 3.1 + 2.0),
        (1e-1, 1 + 0.5 + 11, 12.5, 12.5 + 31 + 2.0),  # the part takes longer than the rollout
    ):
        training = TrainingCost(token=token, update=2.0, part=0.5)
        rules = {"batch_prompts": 2, "batch_samples": 2}
        [step] = simulated(prompts, 0, 1, rules, replicas=(cost,) * 2, training=training)
        [part] = step.parts
        assert part[:3] == (pytest.approx(1.0), pytest.approx(through), 1)
        assert (part.tokens, step.early_share) == (110, 0.5)
        assert (step.collected, step.ended) == (pytest.approx(collected), pytest.approx(ended))
        assert step.idle_s == pytest.approx(collected - (through - 1.0))
        assert step.bubble == pytest.approx(1 - 400 / 600), "the wait for the part counts as a bubble"


def test_parts_train_before_replicas_have_the_version():
    prompts, training = made(0, prompts=40), TrainingCost(token=6e-4, update=1.0, sync=3.0)  # the trainer is slower
    waits, overlapped = (simulated(prompts, 2, training=replace(training, copy=copy)) for copy in (None, 0.5))
    published = [step.ended for step in overlapped[:-1]]
    began = [step.parts[0].began for step in overlapped[1:]]
    assert all(at <= part < at + 2.5 for at, part in zip(published, began, strict=True)), "replicas take 2.5 s more"
    assert 0.5 * 5 * 2.5 < waits[-1].ended - overlapped[-1].ended <= 5 * 2.5


def test_the_trainer_waits_for_replicas_that_load_a_version_together():
    prompts, together = made(0), {"relayed": False}
    copied = replace(TRAINING, copy=0.1)
    assert simulated(prompts, 2, rules=together, training=copied) == simulated(prompts, 2, rules=together)
