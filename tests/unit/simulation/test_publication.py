"""Publication of versions that replicas load later, while parts of the next batch are trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from verl_rhyme.planning.cost import ReplicaCost, StepCost, TrainingCost
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Scenario, Streaming
from verl_rhyme.simulation.workload import Lengths

RULES = Rules(batch_prompts=8, batch_samples=32, max_staleness=2, separate=True, relayed=True)
COST = ReplicaCost(StepCost(base=0.01, row=1e-4, cached=1e-7), prefill=1e-5, slots=16)
TRAINING = TrainingCost(token=6e-4, update=1.0, sync=3.0)  # the trainer is the slower of the two


def simulated(training: TrainingCost = TRAINING, seed: int = 0, **changes: Any) -> Simulation:
    scenario = Scenario((COST,) * 3, replace(RULES, **changes), training, Streaming(4), colocated=False)
    made = Simulation(scenario, Lengths({50: 100, 99: 900}, limit=1000).epochs(40, 4, 1, 20, seed=seed))
    made.run()
    return made


def test_parts_train_before_replicas_have_the_version():
    waits, overlapped = simulated(), simulated(replace(TRAINING, copy=0.5))
    published = [step.ended for step in overlapped.steps[:-1]]
    began = [step.parts[0].began for step in overlapped.steps[1:]]
    assert all(at <= part < at + 2.5 for at, part in zip(published, began, strict=True)), "replicas take 2.5 s more"
    spared = waits.steps[-1].ended - overlapped.steps[-1].ended
    assert 0.5 * 5 * 2.5 < spared <= 5 * 2.5


def test_the_trainer_waits_for_replicas_that_load_a_version_together():
    assert simulated(replace(TRAINING, copy=0.5), relayed=False).steps == simulated(relayed=False).steps


@settings(max_examples=20)
@given(
    st.integers(0, 99),
    st.integers(0, 3),
    st.sampled_from([None, "finish"]),
    st.sampled_from(["finished", "loaded"]),
    st.floats(0, 8.0),
    st.floats(0, 1.0),
)
def test_every_sample_is_trained_once_and_within_the_bound(seed, staleness, at_version, take, sync, copied):
    """Also if a version is published before replicas have loaded the previous one."""
    training = TrainingCost(token=1e-4, update=0.1, sync=sync, start=0.2, copy=copied * sync)
    given = {"max_staleness": staleness, "at_version": at_version if staleness else None, "take": take}
    simulation = simulated(training, seed, **given)
    assert [step.version for step in simulation.steps] == list(range(5))
    assert sum(step.samples for step in simulation.steps) == 160
    assert max(step.staleness_max for step in simulation.steps) <= staleness
    assert simulation.cluster.now >= simulation.steps[-1].ended
