"""Simulate ``full`` on 128 and 1,024 GPUs next to the published schedules and verl's trainer modes.

    python -m benchmarks.full_scale [--json] [--quick] [--only PART] [--gpus 1024] [--arm TEXT] [--seeds 2]

Setting: ``examples/simulate/dapo32b.yaml``: 32B, batches of 512 prompts x 16 (verl's DAPO recipe), responses of up to
20,480 tokens, costs of H800s estimated from data sheets. The batch is the same on 1,024 GPUs. With separate engines,
the planner of ``verl-rhyme plan`` splits the GPUs by each arm's staleness bound.

Drafts: tokens per decoding step and verified draft tokens per gained token are those of the least favourable of six
recorded traces (``roads``, adaptive drafts at ``floor=0.05``: results/draft_quality.jsonl).

The simulation covers a slice: an eighth of 1,024 GPUs or a quarter of 128, with the same share of the batch. Training a
token takes that factor longer in the slice. Each replica has the same work, and a training step takes the same time.

Figures cover eight training steps (two epochs) after eight warm-up steps, and no arm runs out of prompts. On-policy
they cover twelve steps: arms start three or four batches at once, and tail batching alternates two short rounds and a
long one. Both then count whole.

Each row has a ``fingerprint``: a hash of the ``--quick`` results of all arms with drafts, by the code that made the
row. ``--table`` fails if rows of ``results/full_scale.jsonl`` have another fingerprint than the current code, or if
``docs/results.md`` has other tables than these rows. To regenerate them:

    python -m benchmarks.full_scale --json > benchmarks/results/full_scale.jsonl
    python -m benchmarks.full_scale --table
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from omegaconf import OmegaConf

from benchmarks.machine import commit, print_row
from verl_rhyme.config import RhymeConfig, StreamingConfig
from verl_rhyme.config.config_tree import parse
from verl_rhyme.config.presets import tree
from verl_rhyme.planning import plan_file
from verl_rhyme.planning.planner import plan
from verl_rhyme.planning.workload import Prompt
from verl_rhyme.scheduling.batch import Collected
from verl_rhyme.scheduling.rules import Rules, Unit, of_options
from verl_rhyme.simulation import cluster_file
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Drafts, Scenario, Step

Row = dict[str, Any]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "full_scale.jsonl"
#: Number of GPUs, and of equal slices; one slice is simulated.
GPUS, QUICK = {1024: 8, 128: 4}, {64: 1}
#: Tokens of a prompt.
PROMPT = 300
#: Training steps of an epoch, and warm-up steps.
EPOCH, WARM = 4, 8
DRAFTS = Drafts(acceptance=(1.61, 2.25), overhead=2.77)


@dataclass(frozen=True)
class Arm:
    """A schedule."""

    name: str
    preset: str | None
    staleness: int  # bound, in policy versions
    separate: bool = True  # engines have separate GPUs
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # in addition to the preset's
    verls: bool = False  # schedule of a verl trainer mode
    drafts: bool = False
    unit: Unit = "group"

    @property
    def label(self) -> str:
        where = "separate" if self.separate else "colocated"
        return f"{self.name}, k={self.staleness}, {where}{', drafts' * self.drafts}"

    @property
    def rhyme(self) -> RhymeConfig:
        """Configuration of the preset with this arm's options."""
        found = parse(tree(self.preset or "off", {**self.options, "max_staleness": self.staleness}))
        assert found is not None
        return found

    def rules(self, batch_prompts: int, samples: int) -> Rules:
        """Return the schedule's rules for batches of so many prompts and samples per prompt."""
        if self.verls:
            rules = cluster_file.verls_rules(batch_prompts, samples, separate=self.separate)
            return replace(rules, unit=self.unit, relayed=self.separate, drafts=self.drafts)
        return of_options(
            self.rhyme.scheduling,
            self.staleness,
            separate=self.separate,
            batch_prompts=batch_prompts,
            samples=samples,
            unit=self.unit,
            relayed=self.separate,
            drafts=self.drafts,
        )


SYNC = Arm("verl, sync", None, 0, separate=False, verls=True)
SEPARATE_ASYNC = Arm("verl, separate_async", None, cluster_file.VERLS_STALENESS, verls=True)
#: Responses under one version each, five batches in flight, as in Laminar (arXiv:2510.12633; without its repacking).
LAMINAR = Arm(
    "like Laminar",
    None,
    4,
    options={"scheduling.in_flight": 5, "scheduling.at_version": "finish"},
)
ARMS = [
    SYNC,
    *(Arm("full", "full", k, separate=False) for k in (0, 1, 2, 4)),
    *(Arm("sorted", "sorted", k, separate=False) for k in (0, 1)),
    Arm("histopipe", "histopipe", 0, separate=False),
    SEPARATE_ASYNC,
    *(Arm("full", "full", k) for k in (0, 1, 2, 4)),
    *(Arm("stream", "stream", k) for k in (0, 1, 2, 4)),
    # StreamRL's rules with our placement
    *(Arm("stream, longest_first", "stream", k, options={"placement.policy": "longest_first"}) for k in (1, 2, 4)),
    Arm("histopipe", "histopipe", 1),
    LAMINAR,
]
#: The schedule of ``full`` without drafts.
TAIL_BATCHING = Arm("tail batching", "full", 0, separate=False, options={"scheduling.put_off": 0.25}, drafts=True)
ARMS = [*(replace(arm, drafts=drafts) for drafts in (True, False) for arm in ARMS), TAIL_BATCHING]

#: Other models and recipes: cluster file, GPUs of a replica and of a copy of the training weights, unit of a batch.
MODELS: dict[str, tuple[str, int, int, Unit]] = {
    "32B, DAPO": ("dapo32b", 4, 8, "group"),
    "32B, REINFORCE++": ("dapo32b", 4, 8, "trajectory"),
    "72B, PPO": ("streamrl72b", 8, 16, "trajectory"),
    "14B, GRPO": ("rhymerl14b", 2, 8, "group"),
}
MAIN = "32B, DAPO"
MODEL_ARMS = [
    replace(arm, drafts=True)
    for arm in (
        SYNC,
        *(Arm("full", "full", k, separate=False) for k in (0, 1)),
        *(Arm("full", "full", k) for k in (1, 2, 4)),
        Arm("stream", "stream", 1),
    )
]


@dataclass(frozen=True)
class Setting:
    """Model with its recipe, and a slice of so many GPUs."""

    gpus: int
    parts: int  # equal slices; one is simulated
    model: str = MAIN  # key of MODELS
    seed: int = 0
    quick: bool = False  # a small batch

    @property
    def tp(self) -> int:
        return MODELS[self.model][1]

    def load(self, replicas: int = 1, token: float | None = None) -> cluster_file.Loaded:
        """Return costs and prompts of a slice with so many replicas, which trains a token in so many seconds."""
        path = _file(self.model)
        batch, samples = _batch(path)
        batch, samples = (16, 4) if self.quick else (batch // self.parts, samples)
        sizes = [f"batch_prompts={batch}", f"workload.samples={samples}", f"workload.prompts={EPOCH * batch}"]
        given = [*sizes, "workload.epochs=8", f"workload.seed={self.seed}", "forecasts=history"]
        given.append(f"replicas.0.count={replicas}")
        return cluster_file.load(path, [*given, *([f"training.token={token}"] if token is not None else [])])


def _file(model: str) -> Path:
    return ROOT / "examples" / "simulate" / f"{MODELS[model][0]}.yaml"


@cache
def _batch(path: Path) -> tuple[int, int]:
    """Return the prompts of a batch and the samples per prompt in a cluster file."""
    loaded = cluster_file.load(path)
    rules = loaded.scenario.rules
    return rules.batch_prompts, rules.batch_samples // rules.batch_prompts


@cache
def _token(model: str) -> float:
    """Return the seconds in which one GPU trains a token."""
    return cluster_file.load(_file(model)).scenario.training.token * 128  # the files are of 128 GPUs


@cache
def planned(arm: Arm, gpus: int, model: str = MAIN) -> tuple[int, int]:
    """Return the GPUs for rollout and for training, of so many."""
    if not arm.separate:
        return gpus, gpus
    path = _file(model)
    _, tp, copy_gpus, _ = MODELS[model]
    batch, samples = _batch(path)
    cluster = OmegaConf.load(path)
    changes = [
        *(f"sites.0.gpus={gpus}", f"model={cluster.model}", f"kinds.0.tp=[{tp}]", f"max_staleness={arm.staleness}"),
        *(f"batch.prompts={batch}", f"batch.samples={samples}", f"sync={cluster.training.sync}"),
        f"batch.response_limit={cluster.workload.response_limit}",
        *(f"batch.percentiles.{percent}={tokens}" for percent, tokens in cluster.workload.percentiles.items()),
        *(f"kinds.0.training.token={_token(model)}", f"kinds.0.training.copy_gpus={copy_gpus}"),
    ]
    if arm.drafts:
        changes += [f"drafts.acceptance={DRAFTS.acceptance[-1]}", f"drafts.overhead={DRAFTS.overhead}"]
    best = plan(plan_file.load(ROOT / "examples" / "plan" / "one_site.yaml", changes).problem).best
    return best.rollout_gpus, best.train_gpus


@cache
def simulate(arm: Arm, at: Setting, share: float | None = None) -> dict[str, Any]:
    """Simulate one run of an arm.

    Args:
        arm: Schedule.
        at: Model and slice.
        share: Share of the GPUs for rollout; ``None``: the planner's.
    """
    rollout, training = planned(arm, at.gpus, at.model)
    if share is not None:
        rollout = round(share * at.gpus / 8) * 8
        training = at.gpus - rollout
    loaded = at.load(max(1, round(rollout / at.tp / at.parts)), _token(at.model) / training * at.parts)
    prompts = list(loaded.prompts)
    scenario = _scenario(arm, loaded.scenario)
    counted = 8 if arm.staleness else 12
    steps, collections = _run(scenario, prompts, WARM + counted)
    found = _figures(steps[-counted:], collections[-counted:], at.parts)
    return {"rollout_gpus": rollout, "train_gpus": training, **found}


def _scenario(arm: Arm, like: Scenario) -> Scenario:
    """Return the scenario of an arm on a slice's costs."""
    rules = arm.rules(like.rules.batch_prompts, like.rules.batch_samples // like.rules.batch_prompts)
    part_samples = None
    if arm.preset:  # as the pipeline does in training
        part = StreamingConfig().part
        part_samples = max(1, int((part or 1) * rules.batch_samples)) if arm.separate else None
    return replace(
        like,
        rules=rules,
        part_samples=part_samples,
        colocated=not arm.separate,
        placement=arm.rhyme.placement.policy or "least_loaded",
        drafts=DRAFTS if arm.drafts else Drafts(),
        limited=arm.preset is not None,
    )


def _run(scenario: Scenario, prompts: Sequence[Prompt], updates: int) -> tuple[list[Step], list[Collected]]:
    simulation, collections = Simulation(scenario, prompts), list[Collected]()
    take = simulation.rollout.take

    def take_and_record() -> Any:
        batch = take()
        collections.append(batch.collected)
        return batch

    simulation.rollout.take = take_and_record  # type: ignore[method-assign]
    simulation.run(steps=updates)
    if simulation.placement.errors:
        raise RuntimeError(f"{scenario.placement} failed: {simulation.placement.last_error}")
    return simulation.steps, collections[:updates]


def _figures(steps: list[Step], collections: list[Collected], parts: int) -> dict[str, Any]:
    """Return figures of consecutive training steps."""
    seconds = steps[-1].ended - steps[0].began
    staleness = np.concatenate([collected.staleness for collected in collections])
    tokens = sum(step.tokens for step in steps)
    return {
        "step_s": round(seconds / len(steps), 1),
        "samples_per_s": round(parts * sum(step.samples for step in steps) / seconds, 2),
        "tokens_per_s": round(parts * tokens / seconds),
        "staleness_mean": round(float(staleness.mean()), 2),
        "staleness_max": int(staleness.max()),
        "wasted": round(sum(step.wasted for step in steps) / tokens, 3),
        "bubble_ratio": round(statistics.mean(step.bubble for step in steps), 3),
        "trainer_waits": round(sum(step.idle_s for step in steps) / seconds, 3),
        "early": round(statistics.mean(step.early_share for step in steps), 3),
        "step_s_by_update": [round(step.seconds, 1) for step in steps],
        "mean_length_by_update": [round(step.tokens / step.samples) for step in steps],
    }


def compare(
    sizes: Mapping[int, int], named: str = "", seeds: Sequence[int] = (0,), quick: bool = False
) -> Iterator[Row]:
    """Yield the rows of all arms whose label contains ``named``."""
    for gpus, parts in sizes.items():
        for seed in seeds:
            for arm in ARMS:
                if named in arm.label:
                    yield _row(arm, Setting(gpus, parts, seed=seed, quick=quick))


def _row(arm: Arm, at: Setting) -> Row:
    about = {"model": at.model, "gpus": at.gpus, "seed": at.seed, "arm": arm.name, "max_staleness": arm.staleness}
    return {**about, "separate": arm.separate, "drafts": arm.drafts, **simulate(arm, at)}


def models(seeds: Sequence[int] = (0,)) -> Iterator[Row]:
    """Yield the rows of other models and recipes by staleness bound, on 128 GPUs with drafts."""
    for model, (*_, unit) in MODELS.items():
        for seed in seeds:
            for arm in MODEL_ARMS:
                yield _row(replace(arm, unit=unit), Setting(128, GPUS[128], model, seed))


@cache
def fingerprint() -> str:
    """Return a hash of the quick results of all arms; rows with another hash are of other code."""
    rows = [
        [row["tokens_per_s"], row["wasted"], row["staleness_mean"]] for row in compare(QUICK, ", drafts", quick=True)
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:12]


def recorded() -> list[Row]:
    """Return the rows in :data:`RESULTS`."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()]


def tables(rows: Iterable[Row]) -> list[str]:
    """Return the Markdown tables of the arms by size, and of the models. A cell is the means over the seeds: tokens per
    second over ``verl, sync``, staleness (mean; maximum) and wasted tokens of those trained, each if above 0.
    """
    found: dict[str, dict[tuple[bool, str, int], dict[str, list[Row]]]] = {"arms": {}, "models": {}}
    for row in rows:
        if row["part"] == "models" and row["model"] == MAIN:
            continue  # the table of the arms has it
        size = f"{row['gpus']:,} GPUs{', drafts' * row['drafts']}"
        arms = found[row["part"]].setdefault((row["separate"], row["arm"], row["max_staleness"]), {})
        arms.setdefault(size if row["part"] == "arms" else row["model"], []).append(row)
    return [_table(arms) for arms in found.values()]


def _table(arms: Mapping[tuple[bool, str, int], Mapping[str, list[Row]]]) -> str:
    def mean(of: Sequence[Row], name: str) -> float:
        return statistics.mean(row[name] for row in of)

    base = arms[False, SYNC.name, 0]
    lines = [f"| schedule | engines | k | {' | '.join(base)} |", "|---" * (3 + len(base)) + "|"]
    for (separate, name, k), by_column in sorted(arms.items(), key=lambda arm: arm[0][0]):
        cells = [f"`{name}`", "separate" if separate else "colocated", str(k)]
        for column, first in base.items():
            if of := by_column.get(column):
                wasted, stale = mean(of, "wasted"), max(row["staleness_max"] for row in of)
                ratio = mean(of, "tokens_per_s") / mean(first, "tokens_per_s")
                cell = f"{ratio:.2f}" + (f" ({mean(of, 'staleness_mean'):.1f}; {stale})" if stale else "")
                cells.append(cell + (f" {wasted:.0%}" if wasted >= 0.005 else ""))
            else:
                cells.append("")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per line")] = False,
    quick: Annotated[bool, typer.Option(help="64 GPUs, few prompts (ten seconds)")] = False,
    only: Annotated[str, typer.Option(help="arms or models")] = "",
    gpus: Annotated[int, typer.Option(help="128 or 1024; 0: both")] = 0,
    arm: Annotated[str, typer.Option(help="only arms whose label contains this text")] = "",
    seeds: Annotated[int, typer.Option(help="runs of each arm", min=1)] = 2,
    as_table: Annotated[bool, typer.Option("--table", help="print the recorded rows as Markdown (30 s)")] = False,
) -> None:
    """Run all arms, then the other models."""
    if as_table:
        print("\n\n".join(made := tables(recorded())))
        if old := {row["commit"] for row in recorded() if row["fingerprint"] != fingerprint()}:
            raise SystemExit(f"{RESULTS.name} has rows of other code ({old}): regenerate them")
        document = ROOT / "docs" / "results.md"
        if any(table not in document.read_text() for table in made):
            raise SystemExit(f"{document} has other tables: replace them with these")
        return
    commit()  # before any file changes
    sizes = QUICK if quick else {size: parts for size, parts in GPUS.items() if gpus in (0, size)}
    drawn = range(1 if quick else seeds)
    runs = {"arms": compare(sizes, arm, drawn, quick), "models": models([] if quick else drawn)}
    for part in [only] if only else list(runs):
        for row in runs[part]:
            origin = {"benchmark": "full_scale", "part": part, "fingerprint": fingerprint(), "commit": commit()}
            print_row({**origin, **row}, as_json, "  ".join(f"{name} {value}" for name, value in row.items()))


if __name__ == "__main__":
    app()
