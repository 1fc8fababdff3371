"""Simulated training runs, with the rollout code of training."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from verl_rhyme.planning.cost import ReplicaCost, StepCost, TrainingCost
from verl_rhyme.planning.workload import Lengths, Prompt, Turn, Turns
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.simulation import summary
from verl_rhyme.simulation.engine import Request, Segment
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Drafts, Scenario, Step

COST = ReplicaCost(StepCost(base=0.01, row=1e-4, cached=1e-7), prefill=1e-5, slots=8)
BATCH: dict[str, Any] = {"batch_prompts": 8, "batch_samples": 32}
SEPARATE: dict[str, Any] = {**BATCH, "separate": True, "relayed": True}
RULES = {
    "sync": Rules(**BATCH, max_staleness=0),
    "tail batching": Rules(**BATCH, max_staleness=0, in_flight=1.25, put_off=0.25),
    "colocated": Rules(**BATCH),
    "sorted": Rules(**BATCH, max_staleness=0, in_flight=2, refill="when_empty"),
    "sorted partial": Rules(**BATCH, max_staleness=2, in_flight=2, refill="when_empty"),
    "sorted separate": Rules(**SEPARATE, max_staleness=0, in_flight=2, refill="when_empty"),
    "separate on-policy": Rules(**SEPARATE, max_staleness=0),
    "separate": Rules(**SEPARATE),
    "separate, all at once": Rules(**BATCH, max_staleness=3, separate=True),
    "separate, as loaded": Rules(**SEPARATE, take="loaded"),
    "finish": Rules(**SEPARATE, take="loaded", at_version="finish"),
}
LENGTHS = Lengths({50: 100, 90: 400, 99: 900}, limit=1000)


def scenario(mode: str = "sync", **changes: Any) -> Scenario:
    rules = RULES[mode]
    training = TrainingCost(token=1e-4, update=1.0, sync=0.5, reward=0.2)
    given = {"replicas": (COST,) * 3, "rules": rules, "training": training, "response_limit": 1000}
    return Scenario(**{**given, "colocated": not rules.separate, **changes})


def run(given: Scenario, prompts: list[Prompt], kind: type[Simulation] = Simulation) -> tuple[Any, list[Step], Any]:
    """Run a simulation in which each sample is trained once; return its steps and segments, too."""
    segments: list[tuple[str, Segment]] = []
    simulation = kind(given, prompts, None, segments)
    steps = simulation.run()
    assert sum(step.samples for step in steps) == sum(len(prompt.lengths) for prompt in prompts)
    assert sum(step.tokens for step in steps) == sum(int(prompt.lengths.sum()) for prompt in prompts)
    assert max(step.staleness_max for step in steps) <= given.rules.max_staleness
    done = Counter(segment.request.name for _, segment in segments if segment.reason == "done")
    assert max(done.values()) == 1
    assert simulation.placement.errors == 0, simulation.placement.last_error
    assert not simulation.placement.fleet.requests.any(), "finished requests still count"
    return simulation, steps, segments


@pytest.mark.parametrize("mode", RULES)
@pytest.mark.parametrize("room", [np.inf, 2500])
def test_every_sample_is_trained_once(mode, room):
    cost = ReplicaCost(COST.step, COST.prefill, COST.slots, room)
    simulation, steps, segments = run(scenario(mode, replicas=(cost,) * 3), list(LENGTHS.epochs(32, 4, 2, 20)))
    assert [step.version for step in steps] == list(range(8))
    for before, after in itertools.pairwise(steps):
        assert before.began <= before.collected < before.ended == after.began
    assert all(0 <= step.bubble <= 1 for step in steps)
    made = sum(engine.made for engine in simulation.cluster.engines.values())
    wasted = sum(step.wasted for step in steps)
    assert made == pytest.approx(sum(step.tokens for step in steps) + wasted, rel=0.01)
    assert summary.totals(simulation)["wasted"] == pytest.approx(wasted / made, rel=0.01)
    for replica in simulation.cluster.engines:  # no more requests at a time than slots
        own = sorted((s.began, s.ended) for name, s in segments if name == replica)
        for at in {began for began, _ in own}:
            assert sum(began <= at < ended for began, ended in own) <= cost.slots


@pytest.mark.parametrize("mode", ["sync", "separate, as loaded"])
@pytest.mark.parametrize("policy", ["longest_first", "histopipe", "skewness_aware"])
@pytest.mark.parametrize("forecasts", ["history", "none"])
def test_placed_by_forecasts_every_sample_is_trained_once(mode, policy, forecasts):
    options = {"groups": 3, "tail": 1.0} if policy == "histopipe" else {}
    given = scenario(mode, placement=policy, options=options, forecasts=forecasts)
    simulation, _, segments = run(given, list(LENGTHS.epochs(32, 4, 2, 20)))
    moved = simulation.dispatch.moved
    moves = policy == "histopipe" and forecasts == "history"
    assert (moved > 0) == moves, "only histopipe with uncertain forecasts migrates"
    if mode == "sync":  # no other requests are withdrawn
        assert sum(segment.reason == "withdrawn" for _, segment in segments) <= moved
    assert {name for name, segment in segments if segment.reason == "done"} == set(simulation.cluster.engines)


def test_a_replica_loads_a_version_when_its_older_requests_have_finished():
    simulation, steps, segments = run(scenario("finish"), list(LENGTHS.epochs(64, 4, 2, 20)))
    assert sum(step.wasted for step in steps) == 0
    assert {step.staleness_max for step in steps} == {0, 1}
    overlaps = 0
    for step in steps[:-1]:
        needs = step.version + 1  # the version that this step makes; the prompts after the next batch's need it
        for replica in simulation.cluster.engines:
            own = [(s, int(s.request.name.uid) // 8) for name, s in segments if name == replica]
            first = min((s.began for s, batch in own if batch == needs + 1), default=np.inf)
            before = [s.ended for s, batch in own if batch == needs and s.began < step.ended]
            assert first >= step.ended, "a request began before its version was published"
            assert first >= max(before, default=0.0), "a request began while an older version was serving"
            overlaps += step.ended < max(before, default=0.0)
    assert overlaps, "no replica was behind: the test is void"


class Watched(Simulation):
    """Samples that migrate to replicas that lag behind get tokens of the right version, at most one stale."""

    moved_back = 0

    def _move(self) -> None:
        before = {name: sample.replica for name, sample in self._under_way.items()}
        super()._move()
        for name, at in before.items():
            self.moved_back += self._version_of(self._under_way[name].replica) < self._version_of(at)

    def _generated(self, replica: str, request: Request) -> None:
        served, batch, sample = self._version_of(replica), int(request.name.uid) // 8, self._under_way[request.name]
        assert served >= batch - 1
        super()._generated(replica, request)
        assert sample.first <= served

    def _version_of(self, replica: str) -> int:
        return self.replicas.versions[replica]


def test_a_sample_migrated_to_a_replica_with_an_older_version_waits_there():
    given = scenario("finish", placement="histopipe", options={"groups": 1, "tail": 1.0})
    seen = 0
    for seed in range(2):
        simulation, *_ = run(given, list(LENGTHS.epochs(64, 4, 2, 20, seed=seed)), Watched)
        seen += simulation.moved_back
    assert seen, "no sample migrated to an older version: the test is void"


def test_steps_take_as_long_as_their_longest_replica():
    """One request per replica: times and bubble ratios have a closed form."""
    costs = tuple(ReplicaCost(StepCost(base=0.01), slots=1) for _ in range(2))
    rules = Rules(batch_prompts=2, batch_samples=2, max_staleness=0)
    training = TrainingCost(update=2.0, sync=1.0)
    prompts = [Prompt(str(i), 0, 10, np.array([tokens])) for i, tokens in enumerate((100, 300, 200, 200))]
    simulation = Simulation(scenario(replicas=costs, rules=rules, training=training), prompts)
    steps = simulation.run()
    assert [(step.rollout, step.seconds, step.tokens) for step in steps] == [
        (pytest.approx(rollout), pytest.approx(rollout + 3.0), 400) for rollout in (3.0, 2.0)
    ]
    assert [step.bubble for step in steps] == pytest.approx([1 - 400 / 600, 0.0])
    whole = summary.totals(simulation)
    assert whole["bubble_ratio"] == pytest.approx(1 - 800 / 1000)
    assert (whole["step_s"], whole["rollout_s"]) == (pytest.approx(5.5), pytest.approx(2.5))
    assert (whole["tokens_per_s"], whole["wasted"]) == (pytest.approx(800 / 11), 0)
    shares = [whole[f"trainer_{name}"] for name in ("waiting", "parts", "training", "weights")]
    assert shares == pytest.approx([5 / 11, 0, 4 / 11, 2 / 11])


def test_drafts_shorten_the_second_epoch():
    prompts = list(LENGTHS.epochs(16, 4, 2, 20))
    plain, drafted = (
        Simulation(scenario(drafts=drafts), prompts).run() for drafts in (Drafts(), Drafts((1.0, 2.0), overhead=1.5))
    )
    first, second = (sum(step.rollout for step in steps[:2]) for steps in (plain, drafted))
    assert first == pytest.approx(second)
    assert sum(s.rollout for s in drafted[2:]) == pytest.approx(sum(s.rollout for s in plain[2:]) / 2, rel=0.15)


def test_forecasts_improve():
    steps = Simulation(scenario(), LENGTHS.epochs(64, 4, 4, 20)).run()
    first, last = steps[0].lengths, steps[-1].lengths
    assert (first["seen"], last["seen"]) == (0, 1)
    assert last["rank_correlation"] > 0.5


def test_lengths_have_the_given_percentiles_and_share_of_variance_between_prompts():
    groups = np.array([prompt.lengths for prompt in LENGTHS.epochs(20_000, 4, 1, 20)])
    for percentile, tokens in ((50, 100), (90, 400), (99, 900)):
        assert np.percentile(groups, percentile) == pytest.approx(tokens, rel=0.06)
    assert groups.max() <= 1000
    groups = np.log([prompt.lengths for prompt in Lengths({10: 50, 90: 500}, 10**6, alike=0.6).epochs(5000, 8, 1, 1)])
    assert 1 - groups.var(axis=1, ddof=1).mean() / groups.var() == pytest.approx(0.6, abs=0.03)
    with pytest.raises(ValueError, match="percentiles must be two or more"):
        Lengths({50: 100}, 1000)


def test_regenerated_text_is_drafted_from_itself():
    """New text has the acceptance length of the prompt's visits."""
    drafts = Drafts(acceptance=(2.0,), overhead=1.5, again=20.0)
    assert drafts.of(0, 100) == (2, 1.5)
    pace, verified = drafts.of(0, 100, text=60)
    assert 100 / pace == pytest.approx(40 / 2 + 60 / 20)
    assert verified * 100 / pace == pytest.approx(1.5 * 40 / 2 + 60)
    prompts = list(LENGTHS.epochs(32, 4, 1, 20))
    slow, fast = (
        sum(step.seconds for step in Simulation(scenario("sorted", drafts=each), prompts).run())
        for each in (replace(drafts, again=2.0), drafts)
    )
    assert fast < 0.95 * slow


AGENTS = replace(LENGTHS, turns=Turns(mean=4, tool_seconds=(1.0, 10.0), tool_tokens=30))


@pytest.mark.parametrize("mode", RULES)
@pytest.mark.parametrize("policy", ["longest_first", "histopipe"])
def test_samples_with_tools_are_trained_once_and_continue_in_place(mode, policy):
    cost = ReplicaCost(COST.step, COST.prefill, COST.slots, 6000)
    prompts = list(AGENTS.epochs(32, 4, 2, 20))
    simulation = Simulation(scenario(mode, replicas=(cost,) * 3, placement=policy, limited=True), prompts)
    starts = []
    simulation._start, start = lambda given: (starts.extend(given), start(given)), simulation._start
    steps = simulation.run()
    assert sum(step.tokens for step in steps) == sum(int(prompt.lengths.sum()) for prompt in prompts)
    assert max(step.staleness_max for step in steps) <= RULES[mode].max_staleness
    assert simulation.placement.errors == 0, simulation.placement.last_error
    assert 0.1 < simulation.capacity.away < 0.95
    if RULES[mode].continues:
        assert len(starts) >= 32 * 4 * 2
        assert not any(each.partial for each in starts), "samples with tokens continue in place"
        assert sum(step.wasted for step in steps) == 0


def test_a_tool_takes_its_time_and_the_engine_runs_others_meanwhile():
    """Turns of 100 steps, and 2 s in a tool: samples of one slot take turns, and the second one fills the gap."""
    cost = ReplicaCost(StepCost(base=0.01), slots=1)
    rules = Rules(batch_prompts=2, batch_samples=2, max_staleness=0)
    turns = ((Turn(100, 50, 2.0), Turn(100, 50, 9.0)),)
    prompts = [Prompt(str(i), 0, 10, np.array([200]), turns) for i in range(2)]
    (step,) = Simulation(scenario(replicas=(cost,), rules=rules, training=TrainingCost()), prompts).run()
    assert (step.rollout, step.tokens) == (pytest.approx(1 + 1 + 1 + 1 + 1), 400)


def test_turns_have_the_given_numbers_times_and_tokens():
    groups = [prompt.turns for prompt in replace(AGENTS, limit=10**5).epochs(2000, 4, 1, 20)]
    numbers = np.array([[len(sample) for sample in group] for group in groups])
    assert np.median(numbers) == 4
    assert np.log(numbers).std() == pytest.approx(0.35, abs=0.03)
    turns = [turn for group in groups for sample in group for turn in sample]
    assert np.percentile([turn.tool_s for turn in turns], [50, 99]) == pytest.approx([1, 10], rel=0.06)
    assert np.percentile([turn.tokens for turn in turns], [50, 90]) == pytest.approx([100, 400], rel=0.06)
    cut = [prompt.turns for prompt in AGENTS.epochs(2000, 4, 1, 20)]
    policy = [sum(turn.tokens for turn in sample) for group in cut for sample in group]
    assert max(policy) <= AGENTS.limit
    with pytest.raises(ValueError, match="tool_seconds a median and a 99th"):
        Turns(tool_seconds=(3.0, 1.0))
