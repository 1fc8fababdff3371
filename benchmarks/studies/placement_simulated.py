"""Placement by forecasts of lengths, in the simulator: steps at DAPO's sizes, and what they are sensitive to.

    python -m benchmarks.studies.placement_simulated [--json] [--quick] [--seeds 2] [--only TEXT] [--arm TEXT]

The cluster is ``examples/simulate/dapo32b.yaml`` (costs reckoned, lengths made up) without drafts. ``within a step``:
verl's synchronous order on the GPUs that train. ``across steps``: ``preset=histopipe``, whole batches, on engines of
their own, the actor on as many further GPUs; running responses go on under new weights, or (``finishing``, as
published) a replica takes these when its share of a step is done. Arms are policies, with forecasts from history, where
nothing is seen twice from a length ranker of measured quality, and, as what no policy can know, with the lengths
themselves. Figures are means over the updates from the second epoch on, and over seeds.

The workloads of ``VARIED`` change one thing each, on a quarter of that cluster with a quarter of its prompts, within a
step, and end after the second epoch. ``of_oracle`` is the rollout of ``makespan`` with lengths known beforehand over an
arm's own. Those of ``TOGETHER`` are that quarter with two tokens a step, of which siblings on one replica make so many
more (``drafts.siblings``); ``makespan`` runs unaware of it, and told how many steps that saves (``sibling_gain``).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.machine import commit, describe
from verl_rhyme.simulation import cluster_file
from verl_rhyme.simulation.engine import Segment
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Step

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

CLUSTER = Path(__file__).parents[2] / "examples" / "simulate" / "dapo32b.yaml"
_ACROSS = ["preset=histopipe", "topology=separate", "streaming.part=null"]
SETTINGS = {
    "within a step": ["topology=colocated"],
    "across steps": _ACROSS,
    "across steps, finishing": [*_ACROSS, "scheduling.at_version=finish"],
}
#: Policy, forecasts and options.
Arm = tuple[str, str, dict[str, Any]]
#: Skewness-aware dispatch as published (the sum of two pools), by the larger of them, with more, and bound late.
POOLS: list[dict[str, Any]] = [
    {},
    {"objective": "max"},
    {"objective": "max", "pools": 8},
    {"objective": "max", "late": True},
    {"objective": "max", "pools": 8, "late": True},
]
ARMS: list[Arm] = [
    ("least_loaded", "none", {}),
    *(
        (policy, known, options)
        for policy, variants in (
            ("longest_first", [{}]),
            ("skewness_aware", POOLS),
            ("histopipe", [{}]),
            ("makespan", [{}]),
        )
        for options in variants
        for known in ("history", "oracle")
        if known == "history" or options in (variants[0], variants[-1])
    ),
]
#: What a length ranker tells of prompts never seen, with the rank correlations measured on puzzles and on road maps
#: (docs/ranker.md).
RANKED: list[Arm] = [(policy, f"ranker {of}", {}) for policy in ("longest_first", "makespan") for of in (0.73, 0.34)]
FEW = [arm for arm in ARMS if arm[1] != "oracle" or arm[0] == "makespan"]


def _with_siblings(gain: float) -> list[Arm]:
    """Arms of ``TOGETHER``."""
    policies = ("least_loaded", "none"), ("sticky_group", "none"), ("makespan", "history")
    aware = {"sibling_gain": gain}
    plain: list[Arm] = [(policy, forecasts, {}) for policy, forecasts in policies]
    return [*plain, ("makespan", "history", aware), ("makespan", "oracle", aware)]


def _replicas(count: int, slots: int = 256) -> str:
    return f"replicas=[{{count: {count}, profile: qwen2.5-32b-h800-tp4, slots: {slots}}}]"


_QUARTER = [
    *SETTINGS["within a step"],
    *(_replicas(8), "workload.prompts=256", "batch_prompts=128", "workload.epochs=2"),
]
#: What is changed, by what that shows.
VARIED: dict[str, list[str]] = {
    "a quarter": [],
    "prompts alike: 0.3": ["workload.alike=0.3"],
    "prompts alike: 0.9": ["workload.alike=0.9"],
    "history is old (wander 0.8)": ["workload.wander=0.8"],
    "half are never seen": ["workload.unseen=0.5"],
    "none is seen twice": ["workload.unseen=1"],
    "groups of 4": ["workload.samples=4", "workload.prompts=1024", "batch_prompts=512"],
    "groups of 64": ["workload.samples=64", "workload.prompts=64", "batch_prompts=32"],
    "short tail": ["workload.percentiles={50: 2500, 90: 5000, 99: 8000}"],
    "hardly a tail": ["workload.percentiles={50: 4000, 90: 5000, 99: 6000}"],
    "heavy tail": ["workload.percentiles={50: 1000, 90: 6000, 99: 19000}"],
    "drafts: 2 tokens a step": ["drafts.acceptance=[1,2]"],
    "64 slots": [_replicas(8, 64)],
    "64 slots, none is seen twice": [_replicas(8, 64), "workload.unseen=1"],
}
#: What siblings are worth on one replica, by setting.
TOGETHER = {
    f"siblings +{gain:.0%}, groups of {samples}": (gain, [*VARIED["drafts: 2 tokens a step"], *changes])
    for samples, changes in ((16, []), (4, VARIED["groups of 4"]))
    for gain in (0.1, 0.3)
}


def simulate(changes: list[str], policy: str, forecasts: str, seed: int) -> dict[str, Any]:
    """Figures of one run."""
    kind, _, quality = forecasts.partition(" ")
    known = ["forecasts=history", f"ranker={quality}"] if kind == "ranker" else [f"forecasts={kind}"]
    others = ["drafts.acceptance=[1]", "workload.epochs=3", f"workload.seed={seed}"]
    return figures(*run(cluster_file.load(CLUSTER, [f"placement.policy={policy}", *known, *others, *changes])))


def run(
    loaded: cluster_file.Loaded, segments: list[tuple[str, Segment]] | None = None
) -> tuple[Simulation, list[Step]]:
    """A run, and its updates from the second epoch on.

    Raises:
        RuntimeError: Its placement failed.
    """
    simulation = Simulation(loaded.scenario, loaded.prompts, loaded.updates, segments)
    first = loaded.epoch_prompts // loaded.scenario.rules.batch_prompts
    steps = simulation.run()[first:]
    if simulation.placement.errors:
        raise RuntimeError(f"{loaded.scenario.placement} failed: {simulation.placement.last_error}")
    return simulation, steps


def figures(simulation: Simulation, steps: list[Step]) -> dict[str, float]:
    """What it came to."""
    return {
        "step_s": statistics.mean(step.seconds for step in steps),
        "rollout_s": statistics.mean(step.rollout for step in steps),
        "bubble_ratio": statistics.mean(step.bubble for step in steps),
        "useful_tokens_per_s": sum(step.tokens for step in steps) / sum(step.seconds for step in steps),
        "staleness_max": max(step.staleness_max for step in steps),
        "moved": simulation.dispatch.moved,
        "preempted": sum(engine.preempted for engine in simulation.cluster.engines.values()),
    }


def _options(row: dict[str, Any]) -> str:
    """An arm's options in short: ``max 8 late``."""
    told = [row[name] for name in ("objective", "pools", "sibling_gain") if name in row]
    return " ".join(map(str, [*told, *["late"] * row.get("late", False)]))


def evaluate(seeds: int, quick: bool, only: str = "", arm: str = "") -> Iterator[dict[str, Any]]:
    """Rows; of each setting ours with lengths known comes last, if it is wanted."""
    small = ["workload.prompts=64", "batch_prompts=32", "workload.samples=8"] if quick else []
    settings = [(name, [*changes, *small], ARMS) for name, changes in SETTINGS.items()]
    if not quick:
        for name, changes in VARIED.items():
            ranked = RANKED if "none is seen twice" in name else []
            settings.append((name, [*_QUARTER, *changes], [*ranked, *FEW]))
        for name, (gain, changes) in TOGETHER.items():
            world = [*_QUARTER, *changes, f"drafts.siblings={gain}"]
            settings.append((name, world, _with_siblings(round(gain / (1 + gain), 3))))
    names = {setting for setting, _, _ in settings}
    for setting, changes, arms in settings:
        if only not in setting or (only in names and only != setting):
            continue
        rows = []
        for policy, forecasts, options in arms:
            if arm not in f"{policy} {forecasts} {_options(options)}":
                continue
            told = [f"placement.options.{name}={value}" for name, value in options.items()]
            runs = [simulate([*changes, *told], policy, forecasts, seed) for seed in range(seeds)]
            means = {name: round(statistics.mean(run[name] for run in runs), 4) for name in runs[0]}
            spread = [round(run["step_s"], 1) for run in runs]
            about = {"setting": setting, "arm": policy, **options, "forecasts": forecasts}
            rows.append({**about, **means, "step_s_by_seed": spread})
        ours = bool(rows) and (rows[-1]["arm"], rows[-1]["forecasts"]) == ARMS[-1][:2]
        known = rows[-1]["rollout_s"] if ours else None
        for row in rows:
            yield row if known is None else {**row, "of_oracle": round(known / row["rollout_s"], 4)}


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="few prompts, one seed")] = False,
    seeds: Annotated[int, typer.Option(help="runs of each arm", min=1)] = 2,
    only: Annotated[str, typer.Option(help="a setting, or those whose name has this in it")] = "",
    arm: Annotated[str, typer.Option(help="arms with this in policy, forecasts, options: makespan, or late")] = "",
) -> None:
    """Simulate every arm in every setting."""
    found = False
    for row in evaluate(1 if quick else seeds, quick, only, arm):
        found = True
        if as_json:
            told = {"benchmark": "placement_simulated", **row, "machine": describe(), "commit": commit()}
            print(json.dumps(told), flush=True)
        else:
            figures = (
                f"step {row['step_s']:7.1f} s  rollout {row['rollout_s']:7.1f} s  bubble {row['bubble_ratio']:.3f}"
                f"  of oracle {row.get('of_oracle', math.nan):.3f}"
            )
            print(
                f"{row['setting']:34} {row['arm']:14} {_options(row):12} {row['forecasts']:8} {figures}"
                f"  moved {row['moved']:.0f}",
                flush=True,
            )
    if not found:
        raise typer.BadParameter(f"nothing has --only {only!r} and --arm {arm!r} in its name{' (--quick)' * quick}")


if __name__ == "__main__":
    app()
