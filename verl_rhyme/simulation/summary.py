"""What a simulated run came to, for tables and JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Step

#: Of a step's row in the table, after its number: seconds that the trainer waited for the batch (the rollout, where
#: engines stand still meanwhile), and those of the whole step, over which the trained tokens are.
COLUMNS = ("waited s", "step s", "tokens/s", "bubble", "wasted", "staleness", "rank corr.")


def row(step: Step) -> dict[str, Any]:
    """A step as one flat object; forecasts under ``lengths/``."""
    flat = asdict(step)
    lengths = flat.pop("lengths")
    times = {"rollout": step.rollout, "seconds": step.seconds, "tokens_per_s": _rate(step)}
    return {**flat, **times, **{f"lengths/{name}": value for name, value in lengths.items()}}


def cells(step: Step) -> list[str]:
    """Those of :data:`COLUMNS`."""
    correlation = step.lengths.get("rank_correlation")
    return [
        f"{step.rollout:.1f}",
        f"{step.seconds:.1f}",
        f"{_rate(step):.0f}",
        f"{step.bubble:.3f}",
        f"{step.wasted / max(1, step.tokens + step.wasted):.0%}",
        str(step.staleness),
        "" if correlation is None else f"{correlation:.2f}",
    ]


def _rate(step: Step) -> float:
    """Trained tokens a second; 0 of a step that took no time: training is free, and its batch was there."""
    return step.tokens / step.seconds if step.seconds else 0.0


def whole(simulation: Simulation) -> dict[str, Any]:
    """Of all steps. ``useful_tokens_per_s`` are trained ones, over rollout and update; ``wasted`` is a share of all."""
    steps, engines = simulation.steps, simulation.cluster.engines.values()
    tokens, wasted = (sum(getattr(step, name) for step in steps) for name in ("tokens", "wasted"))
    seconds = [step.seconds for step in steps]
    span = steps[-1].ended - steps[0].began
    weights = np.array([step.rollout for step in steps])
    if not simulation.scenario.colocated:  # a step's ratio is of all time since the harvest before
        weights = np.diff([steps[0].began, *(step.harvested for step in steps)])
    return {
        "updates": len(steps),
        "samples": sum(step.samples for step in steps),
        "step_s": float(np.mean(seconds)),
        "step_s_median": float(np.median(seconds)),
        "rollout_s": float(np.mean([step.rollout for step in steps])),
        "useful_tokens_per_s": tokens / span if span else 0.0,
        "bubble_ratio": float(np.dot(weights, [step.bubble for step in steps]) / max(weights.sum(), 1e-12)),
        "wasted": wasted / max(1, tokens + wasted),
        "staleness_max": max(step.staleness for step in steps),
        "preempted": sum(engine.preempted for engine in engines),
        "recomputed_tokens": round(sum(engine.recomputed for engine in engines)),
        "replicas": len(simulation.scenario.replicas),
        "gpus": sum(cost.gpus for cost in simulation.scenario.replicas),
    }


def lines(simulation: Simulation) -> list[str]:
    """The same in words."""
    found = whole(simulation)
    return [
        f"{found['updates']} updates of {found['step_s']:.1f} s (waited for batches: {found['rollout_s']:.1f} s), "
        f"{found['useful_tokens_per_s']:.0f} useful tokens/s on {found['gpus']} GPUs of {found['replicas']} replicas"
        + ("" if simulation.scenario.colocated else ", and the trainer's own"),
        f"bubble ratio {found['bubble_ratio']:.3f}, wasted tokens {found['wasted']:.1%}, staleness at most "
        f"{found['staleness_max']}, {found['preempted']} preemptions",
    ]
