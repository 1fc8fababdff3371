"""Simulate agents: several turns with tools between, in ``full`` and in verl's separate_async.

    python -m benchmarks.agents [--json] [--quick] [--only TEXT] [--seeds 3]

Qwen2.5-7B on H800s, by data sheets; 64 prompts x 8 a batch, without drafts. ``training runs`` have four replicas of 64
slots that train eight batches; ``over`` is the ratio to verl's ``separate_async``. With ``work waiting`` one replica
always has prompts to start; ``over`` is the ratio to a limit of started samples at twice
slots or KV caches, wherever they are. ``host KV``: 150 GB of host memory keep what the cache evicts (2.3 us a token).
Figures are without the first two batches, the mean of the seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import print_row
from verl_rhyme.planning import profile
from verl_rhyme.planning.cost import ReplicaCost, TrainingCost
from verl_rhyme.planning.workload import Lengths, Turns
from verl_rhyme.scheduling.capacity import Capacity
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.simulation.cluster_file import verls_rules
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.sample import Sample
from verl_rhyme.simulation.scenario import Scenario, Step

Row = dict[str, Any]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

#: Prompts of a batch, samples of a prompt, batches, and those that are not counted.
BATCH, SAMPLES, BATCHES, WARM = 64, 8, 8, 2
#: Tokens whose KV is in host memory: 150 GB.
HOST = 150e9 / 57344


@dataclass(frozen=True)
class Workload:
    """Turns and tools; the tokens of a turn are log-normal with the given mean."""

    turns: Turns
    turn_tokens: float
    prompt_tokens: int
    slots: int = 64  # of the replica with work waiting

    @property
    def lengths(self) -> Lengths:
        median, sigma = self.turn_tokens * np.exp(-0.18), 0.6
        return Lengths({50: median, 99: median * np.exp(2.326 * sigma)}, 1 << 16, turns=self.turns)


WORKLOADS = {
    "search": Workload(Turns(4, 0.35, (0.5, 5), 600), 150, 600),
    "example": Workload(Turns(8, 0.35, (5, 60), 200), 300, 800),
    "retool": Workload(Turns(6, 0.35, (2, 20), 150, most=12), 900, 500, slots=256),
    "swe": Workload(Turns(25, 0.35, (8, 240), 700, most=60), 250, 2500, slots=256),
}


class Started(Capacity):
    """A limit of started samples, whether they are at an engine or in a tool."""

    away = 0.0  # type: ignore[assignment]

    def _spare(self, steps: float, evicted: int) -> None:
        pass


class Before(Simulation):
    """The rules before samples with tools were known: all turns of a sample have its one place in the queue."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.capacity = Started(self.capacity._slots, self.capacity._room)

    def _submit(self, sample: Sample) -> None:
        request = sample.request(self.cluster.now)._replace(priority=sample.priority)
        self.replicas.submit(sample.replica, sample.needs, request)


@dataclass(frozen=True)
class Arm:
    """A schedule: staleness bound and batches in flight, or verl's."""

    name: str
    staleness: int | None = None
    in_flight: float | None = None
    host: bool = False
    kind: type[Simulation] = Simulation

    def rules(self) -> Rules:
        if self.staleness is None:
            return verls_rules(BATCH, SAMPLES, separate=True)
        return Rules(BATCH, BATCH * SAMPLES, self.staleness, self.in_flight, separate=True, relayed=True)


WHOLE = [
    Arm("separate_async"),
    Arm("k=1", 1),
    Arm("k=3, in_flight=2", 3, 2),
    Arm("k=4", 4),
    Arm("k=4, host KV", 4, host=True),
]
WAITING = [
    Arm("before", 16, kind=Before),
    Arm("full", 16),
    Arm("full, host KV", 16, host=True),
]


def simulate(name: str, arm: Arm, waiting: bool, seed: int, scale: int = 1) -> dict[str, float]:
    """Return the figures of one run; ``scale`` divides its batches."""
    work = WORKLOADS[name]
    cost = replica(work.slots if waiting else 64)
    cost = replace(cost, host=HOST) if arm.host else cost
    rules = arm.rules()
    rules = replace(rules, batch_prompts=BATCH // scale, batch_samples=BATCH * SAMPLES // scale)
    scenario = Scenario(
        replicas=(cost,) * (1 if waiting else 4),
        rules=rules,
        training=TrainingCost(token=1e-5, update=2.0, sync=4.0, copy=2.0, reward=0.5),
        colocated=False,
        placement="least_loaded" if arm.staleness is None else "longest_first",
        limited=arm.staleness is not None,
        forecasts="none" if arm.staleness is None else "history",
        response_limit=1 << 16,
    )
    prompts = list(work.lengths.epochs(BATCHES * rules.batch_prompts, SAMPLES, 1, work.prompt_tokens, seed))
    simulation = arm.kind(scenario, prompts)
    engines = simulation.cluster.engines.values()
    marks = {}

    def mark(step: Step) -> None:
        if step.version + 1 == WARM:
            marks.update(now=simulation.cluster.now, made=sum(e.made for e in engines))
            marks.update(prefilled=sum(e.prefilled for e in engines))

    steps = simulation.run(mark)[WARM:]
    seconds = simulation.cluster.now - marks["now"]
    made, prefilled = (sum(getattr(e, of) for e in engines) - marks[of] for of in ("made", "prefilled"))
    return {
        "tokens_per_s": sum(step.tokens for step in steps) / seconds,
        "made_per_s": made / seconds,
        "prefilled_per_token": prefilled / made,
        "staleness_mean": fmean(step.staleness_mean for step in steps),
        "away": simulation.capacity.away,
        "limit": simulation.capacity.limit,
    }


def replica(slots: int) -> ReplicaCost:
    found = profile.calculated("Qwen/Qwen2.5-7B", "H800", 1, "bfloat16", 1.0, Path("benchmarks"), "replicas.0")
    return replace(found.cost, slots=slots)


def compare(only: str, seeds: Sequence[int], scale: int) -> Iterator[Row]:
    """Yield a row for each workload, kind of run and arm."""
    for name in WORKLOADS:
        for kind, arms in (("training runs", WHOLE), ("work waiting", WAITING)):
            base: list[float] = []
            for arm in arms:
                if only not in f"{name} {kind}":
                    continue
                runs = [simulate(name, arm, kind != "training runs", seed, scale) for seed in seeds]
                figures = {of: fmean(run[of] for run in runs) for of in runs[0]}
                speeds = [run["made_per_s" if arms is WAITING else "tokens_per_s"] for run in runs]
                base = base or speeds
                ratios = [speed / other for speed, other in zip(speeds, base, strict=True)]
                rounded = {of: float(f"{value:.4g}") for of, value in figures.items()}
                over = {"over": round(sum(speeds) / sum(base), 3), "over_by_seed": [round(r, 3) for r in ratios]}
                yield {"workload": name, "runs": kind, "arm": arm.name, "seeds": len(seeds), **over, **rounded}


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
    quick: Annotated[bool, typer.Option(help="One seed, an eighth of a batch.")] = False,
    only: Annotated[str, typer.Option(help="Workloads and kinds of run that contain this text.")] = "",
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 3,
) -> None:
    """See the module."""
    for row in compare(only, range(1 if quick else seeds), 8 if quick else 1):
        print_row({"benchmark": "agents", **row}, as_json)


if __name__ == "__main__":
    app()
