"""``full`` on 128 and 1,024 GPUs, simulated: beside verl's modes, and beside what Laminar published.

    python -m benchmarks.full_scale [--json] [--quick] [--only PART] [--gpus 1024] [--arm TEXT] [--whole] [--seeds 2]

Laminar (arXiv:2510.12633) trains up to 5.48 times verl's tokens a second on up to 1,024 H800s: Qwen2.5 of 7B, 32B and
72B on DAPO-Math-17k. As told in third-party notes, 2.56 times on average over verl, 1.98 over one-step staleness, 1.93
over stream generation, 1.39 over AReaL; generation takes up to 83.1% of verl's time; no staleness is configured, and
that of a trajectory, from its first version to its end, is typically below 3; the actor stands still 0.64 s for weights
of 32B. Not known here: which model and how many GPUs the 5.48 is of, batch, lengths, tensor parallel sizes, splits.

What stands in for these is ``examples/simulate/dapo32b.yaml``, made for another comparison: 32B, updates of 512 prompts
x 16 (verl's DAPO recipe), responses of up to 20,480 tokens, costs reckoned from data sheets. The batch is the same on
1,024 GPUs. Where engines have GPUs of their own the planner of ``verl-rhyme plan`` tells how many, by each arm's
overlap: of drafts it knows nothing, and is given what a token costs with them for what a step costs.

Replicas and batch are a slice, an eighth of 1,024 GPUs and a quarter of 128, which trains a token as many times slower:
each replica has the same to do, and an update takes as long. ``--whole`` simulates all of them, ten times as long.

Figures are of four updates (five where five batches are under way), whose prompts were seen before, in the middle of a
run that goes on: no arm runs empty.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import commit, describe
from verl_rhyme.scheduling.allocation.planner import plan
from verl_rhyme.scheduling.cost import ReplicaCost, StepCost
from verl_rhyme.scheduling.ledger import Harvest
from verl_rhyme.scheduling.rules import Rules
from verl_rhyme.simulation import cluster_file, plan_file
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Scenario, Step

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

EXAMPLES = Path(__file__).parents[1] / "examples"
PROFILE, TP = "qwen2.5-32b-h800-tp4", 4
#: And of how many like parts one is simulated.
GPUS = {1024: 8, 128: 4}
#: Updates of an epoch, and of a load of ``sorting.group_batches``.
EPOCH = 4
#: Tokens a decoding step when a prompt comes first and later, and draft tokens verified for each that was gained: the
#: least of six recorded traces (``roads``, adaptive drafts at ``floor=0.05``: results/draft_quality.jsonl).
ACCEPTANCE, OVERHEAD = (1.61, 2.25), 2.77
#: verl's bound: a prompt spans 8 versions at most (``max_off_policy_threshold``).
VERLS_STALENESS = 7


@dataclass(frozen=True)
class VerlsRules(Rules):
    """Of verl's ``separate_async``: a batch that is awaited and one ahead (``num_warmup_batches=1``), whatever the
    bound of staleness."""

    def load_batches(self, batches_left: int | None) -> int:
        return 2 if batches_left is None else min(2, batches_left)


@dataclass(frozen=True)
class Arm:
    """A system.

    Attributes:
        name: Of it.
        changes: To the cluster file.
        plan: The planner's changes, of what overlaps; ``None``: engines on the GPUs that train.
        warm: Updates before those that count: more where it takes more of them until as many prompts end as begin.
        counted: Those that count: as many as their times come back after.
        oversubscribed: Engines are given twice as many samples as they have slots and room for, and no more.
        drafts: It drafts.
    """

    name: str
    changes: tuple[str, ...] = ()
    plan: tuple[str, ...] | None = None
    warm: int = EPOCH
    counted: int = EPOCH
    oversubscribed: bool = False
    drafts: bool = False

    def drafted(self) -> Arm:
        """With drafts."""
        given = f"drafts.acceptance={list(ACCEPTANCE)}", f"drafts.overhead={OVERHEAD}"
        return replace(self, name=f"{self.name}, drafts", changes=(*self.changes, *given), drafts=True)


_APART, _MAKESPAN = "topology=separate", ("rules.start_order=longest", "placement.policy=makespan")
#: As ``conf/rhyme/full.yaml`` has it.
_FULL = (_APART, "rules.mode=partial", "rules.keep_running=true", *_MAKESPAN, "streaming.enable=true")
_ONE, _DRAINS = ("rules.max_staleness=1",), ("rules.max_staleness=1", "rules.keep_running=true")
_FOUR = ("rules.max_staleness=4",)

SYNC = Arm("verl, sync")
SEPARATE_ASYNC = Arm(
    "verl, separate_async",
    (_APART, "rules.mode=partial", "rules.load=rolling", f"rules.max_staleness={VERLS_STALENESS}"),
    _ONE,
    warm=2 * EPOCH,
)
SORTED = Arm("sorted, partial", ("rules.mode=partial",), oversubscribed=True)
STREAM = Arm("stream, async", (_APART, "rules.mode=stream", "rules.max_staleness=1", *_MAKESPAN), _ONE)
FULL = Arm("full", (*_FULL, "rules.max_staleness=1"), _DRAINS, oversubscribed=True)
ROLLING = Arm("full, rolling", (*FULL.changes, "rules.load=rolling"), _DRAINS, oversubscribed=True)
#: Every sample under one version, trained in the order of ends, whole batches, five batches under way. Without what
#: Laminar has beside that: trajectories moved together (repack).
LAMINAR = Arm(
    "like Laminar, staleness 4",
    (_APART, "rules.mode=partial", "rules.load=rolling", "rules.max_staleness=4", "rules.keep_running=true"),
    _FOUR,
    warm=10,
    counted=5,
)
#: The same, but what runs goes on under each new version where it stood.
STREAM_FOUR = Arm(
    "stream, async, staleness 4",
    (_APART, "rules.mode=stream", "rules.max_staleness=4", *_MAKESPAN),
    _FOUR,
    warm=10,
    counted=5,
)
ROLLING_FOUR = Arm(
    "full, rolling, staleness 4", (*_FULL, "rules.load=rolling", "rules.max_staleness=4"), _FOUR, 10, 5, True
)
ARMS = [SYNC, SEPARATE_ASYNC, SORTED, STREAM, FULL, ROLLING, LAMINAR, STREAM_FOUR]
ARMS += [arm.drafted() for arm in (SYNC, STREAM, FULL, ROLLING, ROLLING_FOUR)]

_FULL_DRAFTED = FULL.drafted()
#: Loads of eight update batches, and of no more than a version of age lets run at once.
EIGHT, TWO = (
    replace(_FULL_DRAFTED, name=f"full, loads of {n}", changes=(*_FULL_DRAFTED.changes, f"rules.group_batches={n}"))
    for n in (8, 2)
)
EIGHT = replace(EIGHT, warm=8, counted=8)
#: What is varied on 1,024 GPUs: changes, the arms, and the share of the GPUs that roll out where that is it.
VARIED: dict[str, tuple[tuple[str, ...], list[Arm], float | None]] = {
    "loads of 2 and 8 batches": ((), [TWO, EIGHT], None),
    "half roll out": ((), [_FULL_DRAFTED, ROLLING.drafted()], 1 / 2),
    "a quarter rolls out": ((), [_FULL_DRAFTED], 1 / 4),
    "cut short at a new version": (("rules.keep_running=false",), [_FULL_DRAFTED, ROLLING.drafted()], None),
    "weights in 0.64 s": (("training.sync=0.64",), [_FULL_DRAFTED, STREAM_FOUR], None),
    "acceptance length 1.33": (("drafts.acceptance=[1.33]",), [_FULL_DRAFTED], None),
    "acceptance length 4.25": (("drafts.acceptance=[2.94,4.25]",), [_FULL_DRAFTED], None),
    "whole batches": (("streaming.enable=false",), [_FULL_DRAFTED], None),
    "least loaded": (("placement.policy=least_loaded",), [_FULL_DRAFTED], None),
    "lengths at 50, 90, 99%: 1800, 9000, 18000": (
        ("workload.percentiles={50: 1800, 90: 9000, 99: 18000}",),
        [SYNC, _FULL_DRAFTED, STREAM_FOUR],
        None,
    ),
}


def load(changes: Sequence[str], parts: int = 1, quick: bool = False) -> cluster_file.Loaded:
    """The cluster file with changes, and prompts for more updates than are looked at; one of so many parts."""
    batch, samples = (16, 4) if quick else (512 // parts, 16)
    sizes = [f"rules.batch_prompts={batch}", f"workload.samples={samples}", f"workload.prompts={EPOCH * batch}"]
    given = [*sizes, "workload.epochs=8", "drafts.acceptance=[1]", *changes]
    return cluster_file.load(EXAMPLES / "simulate" / "dapo32b.yaml", given)


@cache
def planned(arm: Arm, gpus: int) -> tuple[int, int]:
    """GPUs that roll out and that train, of so many."""
    if arm.plan is None:
        return gpus, gpus
    changes = [f"sites.0.gpus={gpus}", f"kinds.0.profiles=[{PROFILE}]", *arm.plan]
    problem = plan_file.load(EXAMPLES / "plan" / "one_site.yaml", changes).problem
    if arm.drafts:
        [pool] = problem.pools
        replicas = {tp: _of_a_token(cost) for tp, cost in pool.replicas.items()}
        problem = replace(problem, pools=[replace(pool, replicas=replicas)])
    best = plan(problem).best
    return best.rollout_gpus, best.train_gpus


def _of_a_token(cost: ReplicaCost) -> ReplicaCost:
    """With drafts, what each request's share of a step costs for each token that the step makes for it."""
    step, pace = cost.step, ACCEPTANCE[-1]
    row = step.row + step.draft * (pace - 1) * OVERHEAD
    return replace(cost, step=StepCost((step.base + step.drafting) / pace, row / pace, step.cached / pace))


class _EnoughError(Exception):
    """All updates that are looked at have ended."""


@cache
def simulate(
    arm: Arm,
    gpus: int,
    changes: tuple[str, ...] = (),
    share: float | None = None,
    seed: int = 0,
    parts: int = 1,
    quick: bool = False,
) -> dict[str, Any]:
    """One run of an arm.

    Args:
        arm: Of :data:`ARMS`.
        gpus: All of them.
        changes: Further ones to the cluster file.
        share: Of the GPUs that roll out; ``None``: the planner's.
        seed: Of the lengths.
        parts: Of so many like parts one is simulated.
        quick: A small workload.
    """
    rollout, training = planned(arm, gpus)
    if share is not None:
        rollout = round(share * gpus / 8) * 8
        training = gpus - rollout
    token = load(changes).scenario.training.token * 128 / training * parts  # the file's is of 128 GPUs
    count = max(1, round(rollout / TP / parts))
    given = [f"replicas=[{{count: {count}, profile: {PROFILE}}}]", f"training.token={token}"]
    loaded = load([*arm.changes, *changes, *given, f"workload.seed={seed}"], parts, quick)
    scenario = loaded.scenario
    if arm.oversubscribed:
        fitting = _fitting(scenario, load(changes, parts, quick))
        scenario = replace(scenario, limit=2 * fitting, lot=max(1, fitting // 2))
    if arm is SEPARATE_ASYNC:
        scenario = replace(scenario, rules=VerlsRules(**vars(scenario.rules)))
    steps, harvests = _run(scenario, loaded, arm.warm + arm.counted)
    about = {
        "rollout_gpus": rollout,
        "train_gpus": training,
        "training_s": round(token * _tokens(steps[-arm.counted :], loaded), 1),
    }
    return {"parts": parts, **about, **_figures(steps[-arm.counted :], harvests[-arm.counted :], parts)}


def _lengths(loaded: cluster_file.Loaded) -> np.ndarray:
    """Of an epoch's responses; they are gone then."""
    return np.concatenate([prompt.lengths for prompt in loaded.prompts if prompt.epoch == 0])


def _fitting(scenario: Scenario, like: cluster_file.Loaded) -> int:
    """Samples that engines have slots and room for, as ``scheduling.capacity`` reckons in training."""
    lengths = _lengths(like)
    held = float(np.sum(lengths * (300 + lengths / 2)) / np.sum(lengths))
    return sum(min(cost.slots, int(cost.room / held)) for cost in scenario.replicas)


def _run(scenario: Scenario, loaded: cluster_file.Loaded, updates: int) -> tuple[list[Step], list[Harvest]]:
    simulation, harvests = Simulation(scenario, loaded.prompts), list[Harvest]()
    take = simulation.rollout.take

    def noted() -> Any:
        batch = take()
        harvests.append(batch.harvest)
        return batch

    def told(_: Step) -> None:
        if len(simulation.steps) == updates:
            raise _EnoughError

    simulation.rollout.take = noted  # type: ignore[method-assign]
    with contextlib.suppress(_EnoughError):
        simulation.run(told)
    if simulation.placement.errors:
        raise RuntimeError(f"{scenario.placement} failed: {simulation.placement.last_error}")
    return simulation.steps, harvests[:updates]


def _tokens(steps: list[Step], loaded: cluster_file.Loaded) -> float:
    return statistics.mean(step.tokens + 300 * step.samples for step in steps)


def _figures(steps: list[Step], harvests: list[Harvest], parts: int) -> dict[str, Any]:
    """Of updates one after another."""
    seconds = steps[-1].ended - steps[0].began
    ages = np.concatenate([harvest.staleness for harvest in harvests])
    logs = [np.log(harvest.lengths) for harvest in harvests]
    spread = float(np.var(np.concatenate(logs)))
    within = sum(len(log) * float(np.var(log)) for log in logs) / sum(map(len, logs))
    return {
        "step_s": round(seconds / len(steps), 1),
        "samples_per_s": round(parts * sum(step.samples for step in steps) / seconds, 2),
        "tokens_per_s": round(parts * sum(step.tokens for step in steps) / seconds),
        "bubble_ratio": round(statistics.mean(step.bubble for step in steps), 3),
        "trainer_waits": round(sum(step.waited for step in steps) / seconds, 3),
        "early": round(statistics.mean(step.early for step in steps), 3),
        "staleness": [round(float(np.mean(ages == age)), 3) for age in range(int(ages.max()) + 1)],
        "step_s_by_update": [round(step.seconds, 1) for step in steps],
        "mean_length_by_update": [round(step.tokens / step.samples) for step in steps],
        "variance_between_updates": round(1 - within / spread, 3),
    }


def compare(
    sizes: dict[int, int], named: str = "", seeds: Sequence[int] = (0,), quick: bool = False
) -> Iterator[dict[str, Any]]:
    """All arms; ``speedup``: tokens a second over those of ``verl, sync`` on as many GPUs."""
    for gpus, parts in sizes.items():
        for seed in seeds:
            base = simulate(SYNC, gpus, seed=seed, parts=parts, quick=quick)["tokens_per_s"]
            for arm in ARMS:
                if named in arm.name:
                    found = simulate(arm, gpus, seed=seed, parts=parts, quick=quick)
                    yield {"gpus": gpus, "arm": arm.name, "seed": seed, "speedup": _gain(found, base), **found}


def vary(gpus: int, parts: int = 1, named: str = "", quick: bool = False) -> Iterator[dict[str, Any]]:
    """Each variation; ``speedup``: over ``verl, sync`` with the same lengths."""
    for name, (changes, arms, share) in list(VARIED.items())[: 1 if quick else None]:
        if named not in name:
            continue
        lengths = tuple(change for change in changes if change.startswith("workload."))
        base = simulate(SYNC, gpus, lengths, parts=parts, quick=quick)["tokens_per_s"]
        for arm in arms:
            found = simulate(arm, gpus, changes, share, parts=parts, quick=quick)
            yield {"varied": name, "gpus": gpus, "arm": arm.name, "speedup": _gain(found, base), **found}


def _gain(found: dict[str, Any], base: float) -> float:
    return round(found["tokens_per_s"] / base, 3)


def bounds(sizes: Iterable[int]) -> Iterator[dict[str, Any]]:
    """What no schedule can be faster than, in seconds, without drafts and with: the longest response alone on its
    replica; all tokens through slots that are always full, on all GPUs; a step where nobody ever waits, at any
    staleness and the best split; and training on all GPUs."""
    for gpus in sizes:
        loaded, shares = load([]), np.linspace(0.01, 0.99, 981)
        [plain], training = set(loaded.scenario.replicas), loaded.scenario.training
        lengths = _lengths(loaded)
        tokens, held = 8192 * float(lengths.mean()), 8192 * float(np.mean(lengths * (300 + lengths / 2)))
        trained = training.token * 128 / gpus * (tokens + 8192 * 300)
        row: dict[str, Any] = {"gpus": gpus, "mean_length": round(tokens / 8192), "training_on_all": round(trained, 1)}
        row["p99_over_median"] = round(float(np.quantile(lengths, 0.99) / np.median(lengths)), 2)
        for name, cost in (("", plain), ("_drafted", _of_a_token(plain))):
            made = float(cost.together(0, tokens, held)) / (gpus // TP)
            steps = np.maximum(made / shares, trained / (1 - shares) + training.update + training.sync)
            row |= {f"longest{name}": round(cost.alone(300, int(lengths.max())), 1)}
            row |= {f"generation_on_all{name}": round(made, 1), f"step_at_best{name}": round(float(steps.min()), 1)}
        yield row


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="64 GPUs, few prompts, one variation")] = False,
    only: Annotated[str, typer.Option(help="bounds, arms or varied")] = "",
    gpus: Annotated[int, typer.Option(help="128 or 1024; 0: both")] = 0,
    arm: Annotated[str, typer.Option(help="arms or variations whose name has this in it")] = "",
    whole: Annotated[bool, typer.Option(help="all replicas, not a slice of them")] = False,
    seeds: Annotated[int, typer.Option(help="runs of each arm", min=1)] = 2,
) -> None:
    """Bounds, all arms, and what they depend on."""
    sizes = {64: 1} if quick else {size: 1 if whole else parts for size, parts in GPUS.items() if gpus in (0, size)}
    rows: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "bounds": lambda: bounds(sizes),
        "arms": lambda: compare(sizes, arm, range(1 if quick else seeds), quick),
        "varied": lambda: vary(*next(iter(sizes.items())), arm, quick),
    }
    for part in [only] if only else list(rows):
        for row in rows[part]():
            if as_json:
                about = {"machine": describe(), "commit": commit()}
                print(json.dumps({"benchmark": "full_scale", "part": part, **row, **about}), flush=True)
            else:
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    app()
