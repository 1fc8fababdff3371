"""Replicas that come and go in a simulated run, by the elastic rule."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from verl_rhyme.scheduling.allocation.elastic import Advice, Elastic, Limits
from verl_rhyme.scheduling.allocation.times import Work, rollout
from verl_rhyme.scheduling.cost import ReplicaCost
from verl_rhyme.scheduling.placement import Request as Asked
from verl_rhyme.simulation.engine import Engine
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Step


def add(simulation: Simulation, name: str, cost: ReplicaCost) -> None:
    """A replica more, with the newest weights."""
    simulation._versions[name] = simulation._arrived
    simulation.cluster.add(name, Engine(cost))
    _resize(simulation)
    simulation.placement.add(name, cost)
    if math.isfinite(cost.room):
        simulation.placement.report(name, int(cost.room))


def _resize(simulation: Simulation) -> None:
    costs = (engine.cost for engine in simulation.cluster.engines.values())
    simulation._occupancy.resize(simulation.cluster.now, simulation.scenario.fillable(costs))


def remove(simulation: Simulation, name: str) -> int:
    """A replica less; what ran or waited there goes on at others, with the tokens it had.

    Returns:
        How many samples that were.

    Raises:
        ValueError: Samples are placed by a plan, or it is the last replica.
    """
    if simulation.dispatch.placement is not None:
        raise ValueError(f"placement {simulation.scenario.placement} plans: what it placed cannot be taken elsewhere")
    if len(simulation.cluster.engines) < 2:
        raise ValueError("the last replica cannot go")
    now = simulation.cluster.now
    waiting = simulation._gates.pop(name, {})
    taken = simulation.cluster.engines[name].withdraw_all(now)
    taken += [(request, request.emitted) for _, request in waiting.values()]
    simulation.placement.remove(name)
    simulation.cluster.remove(name)
    _resize(simulation)
    del simulation._versions[name]
    for request, had in taken:
        sample = simulation._under_way[str(request.name)]
        attempt, prompt = sample.attempt, sample.prompt
        of = simulation._name(attempt), prompt.key, attempt.number, attempt.attempt, len(prompt.lengths), prompt.tokens
        simulation._go_on(sample, request, simulation.placement.acquire(Asked(*of)), had)
    return len(taken)


class ElasticFleet:
    """The rule beside a run: give :meth:`ended` to :meth:`Simulation.run`.

    Args:
        simulation: A run whose engines go on while the actor trains.
        spares: Replicas that may be added, in this order; what was added last goes first.
        limits: Of the rule; those of units are set here.

    Attributes:
        units: Replicas that generated, by step.
        advice: What was advised after each.
        moved: Samples that went on elsewhere.
    """

    def __init__(self, simulation: Simulation, spares: Sequence[ReplicaCost], limits: Limits | None = None) -> None:
        self._simulation = simulation
        self._all = [*simulation.scenario.replicas, *spares]
        given = Limits() if limits is None else limits
        bounds = Limits(1, len(self._all), given.window, given.rest, given.margin)
        self._elastic = Elastic(self._predict, len(simulation.scenario.replicas), bounds)
        self.units: list[int] = []
        self.advice: list[Advice] = []
        self.moved = 0

    def ended(self, step: Step) -> None:
        """A step did."""
        self.units.append(self._elastic.units)
        self._training = step.ended - step.harvested
        advice = self._elastic.observe(step.seconds - min(step.ahead, step.seconds), self._training)
        self.advice.append(advice)
        units = self._elastic.units
        if advice.change > 0:
            add(self._simulation, f"replica-{units}", self._all[units])
        elif advice.change < 0:
            self.moved += remove(self._simulation, f"replica-{units - 1}")
        self._elastic.changed(units + advice.change)

    def _predict(self, units: int) -> float:
        scenario = self._simulation.scenario
        lengths = np.array(self._simulation.trained, dtype=float)
        group = max(1, len(lengths) // scenario.rules.batch_prompts)
        work = Work(np.maximum(lengths, 1.0), len(lengths), group)
        fleet = [(cost, np.array([count])) for cost, count in Counter(self._all[:units]).items()]
        return float(rollout(fleet, work, scenario.rules.max_staleness, self._training)[0])
