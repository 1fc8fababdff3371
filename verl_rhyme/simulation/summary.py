"""Results of a simulated run, as table rows and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Step

#: Columns of a step in the table, after its number. "waited s" are the seconds that the trainer waited for the batch
#: (the rollout, if engines share its GPUs). "tokens/s" are trained tokens over the whole step. "early" is the share of
#: the batch that was trained before the batch was complete.
COLUMNS = ("waited s", "step s", "tokens/s", "early", "bubble", "wasted", "staleness", "rank corr.")


#: First steps that are not typical of a run: batches in flight fill up.
_STARTED = 2


def row(step: Step) -> dict[str, Any]:
    """Return a step as one flat object; forecasts are under ``lengths/``, ``parts`` is a number."""
    flat = asdict(step)
    lengths = flat.pop("lengths")
    times = {"rollout": step.rollout, "waited": step.idle_s, "seconds": step.seconds, "tokens_per_s": _rate(step)}
    parts = {"parts": len(step.parts), "in_parts": step.parts_s, "early": step.early_share}
    return {**flat, **times, **parts, **{f"lengths/{name}": value for name, value in lengths.items()}}


def cells(step: Step) -> list[str]:
    correlation = step.lengths.get("rank_correlation")
    return [
        f"{step.idle_s:.1f}",
        f"{step.seconds:.1f}",
        f"{_rate(step):.0f}",
        f"{step.early_share:.0%}" if step.parts else "",
        f"{step.bubble:.3f}",
        f"{step.wasted / max(1, step.tokens + step.wasted):.0%}",
        f"{step.staleness_mean:.1f} ({step.staleness_max})",
        "" if correlation is None else f"{correlation:.2f}",
    ]


def _rate(step: Step) -> float:
    return step.tokens / step.seconds if step.seconds else 0.0


def totals(simulation: Simulation) -> dict[str, Any]:
    """Return the statistics of all steps; ``wasted`` is a share of all tokens, ``trainer_*`` of the trainer's time."""
    steps, engines = simulation.steps, simulation.cluster.engines.values()
    tokens, wasted = (sum(getattr(step, name) for step in steps) for name in ("tokens", "wasted"))
    seconds = [step.seconds for step in steps]
    span = steps[-1].ended - steps[0].began
    weights = np.array([step.rollout for step in steps])
    if not simulation.scenario.pauses:  # a step's ratio covers the time since the last collection
        weights = np.diff([steps[0].began, *(step.collected for step in steps)])
    held = simulation.scenario.blocked_s
    parts, waited = (sum(getattr(step, name) for step in steps) for name in ("parts_s", "idle_s"))
    synced = sum(min(held, step.ended - step.collected) for step in steps)
    times = {"waiting": waited, "parts": parts, "training": span - waited - parts - synced, "weights": synced}
    return {
        "updates": len(steps),
        "samples": sum(step.samples for step in steps),
        "step_s": float(np.mean(seconds)),
        "step_s_median": float(np.median(seconds)),
        "rollout_s": float(np.mean([step.rollout for step in steps])),
        "tokens_per_s": tokens / span,
        "bubble_ratio": float(np.dot(weights, [step.bubble for step in steps]) / max(weights.sum(), 1e-12)),
        "wasted": wasted / max(1, tokens + wasted),
        "staleness_mean": float(np.average([step.staleness_mean for step in steps], weights=[s.groups for s in steps])),
        "staleness_max": max(step.staleness_max for step in steps),
        "early": float(np.mean([step.early_share for step in steps])),
        "token_mean_cosine": token_mean([step.tokens for step in steps[_STARTED:-1]]),
        **{f"trainer_{name}": spent / span for name, spent in times.items()},
        "preempted": sum(engine.preempted for engine in engines),
        "replicas": len(simulation.scenario.replicas),
        "gpus": sum(cost.gpus for cost in simulation.scenario.replicas),
    }


def token_mean(tokens: Sequence[int]) -> float:
    """Return the cosine between two sums of the gradients of training steps of so many tokens.

    One is that of ``loss_agg_mode=token-mean``, which divides each step by its tokens; the other weighs tokens alike.
    Gradients of tokens are independent and of one size; each step keeps its direction.
    """
    sizes = np.array(tokens, dtype=float)
    return 1.0 if len(sizes) < 2 else float(len(sizes) / np.sqrt(np.sum(1 / sizes) * np.sum(sizes)))


def lines(simulation: Simulation) -> list[str]:
    stats = totals(simulation)
    names = {"waiting": "waiting", "parts": "training parts", "training": "training whole batches"}
    names["weights"] = "sending weights"
    trainer = ", ".join(f"{words} {stats[f'trainer_{name}']:.0%}" for name, words in names.items())
    waited = stats["trainer_waiting"] * stats["step_s"]
    return [
        f"{stats['updates']} training steps of {stats['step_s']:.1f} s (waiting for batches: {waited:.1f} s), "
        f"{stats['tokens_per_s']:.0f} trained tokens/s on {stats['gpus']} GPUs of {stats['replicas']} replicas"
        + ("" if simulation.scenario.colocated else ", in addition to the trainer's GPUs"),
        f"bubble ratio {stats['bubble_ratio']:.3f}, wasted tokens {stats['wasted']:.1%}, staleness "
        f"{stats['staleness_mean']:.2f} (at most {stats['staleness_max']}), {stats['preempted']} preemptions",
        "with loss_agg_mode=token-mean the sum of the steps' gradients has cosine "
        f"{stats['token_mean_cosine']:.2f} to that of equal weights (docs/pipeline.md)",
        f"trainer's time: {trainer}; {stats['early']:.0%} of the samples were trained in parts",
    ][: 3 if simulation.scenario.part_samples is None else 4]
