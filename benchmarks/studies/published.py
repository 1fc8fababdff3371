"""RhymeRL's setting in the simulator: what its arms gain here, beside what was published.

    python -m benchmarks.studies.published [--json] [--quick] [--seeds 2] [--only PART]

128 GPUs, 14B and 32B actors, responses of up to 16k tokens (``examples/simulate/rhymerl14b.yaml``, ``..32b.yaml``).
RhymeRL (arXiv:2508.18588) is known here by what was written about it: its shares and speed-ups, neither batch, lengths,
tensor parallel size nor the split of its GPUs. What stands in for these is held against what is published
of the setting itself; speed-ups are no part of that.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.machine import commit, describe
from benchmarks.studies.placement_simulated import figures, run
from verl_rhyme.simulation import cluster_file
from verl_rhyme.simulation.engine import Segment
from verl_rhyme.simulation.scenario import Step

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

CLUSTERS = Path(__file__).parents[2] / "examples" / "simulate"
GPUS = 128

#: HistoSpec as in the paper: acceptance lengths by epoch (the last for all later ones) and draft tokens verified for
#: each token gained, measured by replaying the traces ``qwen2-t1`` and ``llama-t1`` with ``drafting.policy=paper``.
ACCEPTANCE = (1.0, 2.40, 2.67, 2.78, 2.86)
OVERHEAD = 1.62

#: verl 0.4.1, RhymeRL's baseline, cuts a batch into one part of whole prompts for each replica.
PARTS = ("placement.policy=sticky_group", "placement.options.factor=1.0001")


@dataclass(frozen=True)
class Model:
    """An actor.

    Attributes:
        profile: Of its replicas.
        gpus: Of a replica.
        launch: Seconds of a step that do not shrink with the bandwidth, as its profile has them.
    """

    profile: str
    gpus: int
    launch: float


MODELS = {
    "14b": Model("qwen2.5-14b-h800-tp2", gpus=2, launch=2.5e-3),
    "32b": Model("qwen2.5-32b-h800-tp4", gpus=4, launch=3.5e-3),
}

#: Decoding speed of one request as Qwen publishes it (Qwen2.5's speed benchmark: vLLM 0.6.3, bf16, A100 of 80 GB, 2,048
#: tokens after a prompt): model, GPUs, tokens of the prompt, tokens a second.
DECODING = [("14b", 1, 6144, 43.83), ("14b", 1, 30720, 37.18), ("32b", 1, 1, 22.13), ("32b", 2, 30720, 31.82)]
#: TB/s by NVIDIA's data sheets, of the profiles' H800 and of that A100.
H800, A100 = 3.35, 2.039


def load(model: str, changes: Sequence[str], quick: bool = False) -> cluster_file.Loaded:
    """A cluster with changes."""
    small = ["workload.prompts=64", "batch_prompts=32", "workload.samples=4"] if quick else []
    return cluster_file.load(CLUSTERS / f"rhymerl{model}.yaml", [*changes, *small])


# ---- arms ----


@dataclass(frozen=True)
class Arm:
    """A system.

    Attributes:
        name: Of it.
        changes: To the cluster file.
        separate: Rollout and training have GPUs of their own.
        drafts: HistoSpec is on.
    """

    name: str
    changes: tuple[str, ...]
    separate: bool = False
    drafts: bool = False

    @property
    def planned(self) -> bool:
        """Its placement goes by forecasts."""
        return "forecasts=history" in self.changes


#: As published: updates are trained whole, by replicas of their own.
_PRESET = "preset=histopipe", "streaming.part=null"


def _placed(policy: str, *options: str) -> tuple[str, ...]:
    placed = f"placement.policy={policy}", *(f"placement.options.{option}" for option in options)
    return *_PRESET, "forecasts=history", *placed


BASELINE = Arm("verl 0.4, sync", PARTS)
ONE_TIER = Arm("HistoPipe, one tier", _placed("histopipe", "two_tier=false"), separate=True)
TWO_TIERS = Arm("HistoPipe", _placed("histopipe"), separate=True)
BOTH = Arm("HistoPipe + HistoSpec", _placed("histopipe"), separate=True, drafts=True)
DRAFTS = Arm("HistoSpec alone", PARTS, drafts=True)
ARMS = [
    BASELINE,
    Arm("verl 0.9, sync", ()),
    DRAFTS,
    Arm("verl, separate_async", (), separate=True),
    Arm("HistoPipe's rules, least loaded", (*_PRESET, "placement.policy=least_loaded"), separate=True),
    ONE_TIER,
    TWO_TIERS,
    BOTH,
    Arm("makespan", _placed("makespan"), separate=True),
    Arm("makespan + HistoSpec", _placed("makespan"), separate=True, drafts=True),
]
#: GPUs that roll out where others train; each arm has the best of these.
SPLITS = (48, 64, 80, 96, 112)

#: What was published of RhymeRL, as ratios of step times: by arm and the one it is compared with, with 14B and 32B.
PUBLISHED = {
    (ONE_TIER, BASELINE): {"14b": 1.43},
    (TWO_TIERS, ONE_TIER): {"14b": 1.10},
    (BOTH, TWO_TIERS): {"14b": 1.50},
    (BOTH, BASELINE): {"14b": 2.34, "32b": 2.61},
}


def simulate(model: str, arm: Arm, rollout: int, changes: Sequence[str] = (), quick: bool = False) -> dict[str, float]:
    """One run of an arm.

    Args:
        model: Of :data:`MODELS`.
        arm: Of :data:`ARMS`.
        rollout: GPUs for rollout, where it has its own.
        changes: Further ones to the cluster file, but for those that are not the arm's. Also ``room=``, tokens of a
            cache; where rollout has its own GPUs ``gated=1``, as many slots as samples of an update, so that the next
            begin as these end.
        quick: A small workload.
    """
    kind = MODELS[model]
    how = dict(change.split("=") for change in changes if change.startswith(("room=", "gated=")))
    ours = [change for change in changes if change.partition("=")[0] not in how and _concerns(change, arm)]
    made = [*arm.changes, *["topology=separate"] * arm.separate, *ours]
    if arm.drafts:
        made = [f"drafts.acceptance={list(ACCEPTANCE)}", f"drafts.overhead={OVERHEAD}", *made]
    scenario = load(model, made, quick).scenario
    count = (rollout if arm.separate else GPUS) // kind.gpus
    replicas = {"count": count, "profile": kind.profile, **({"room": float(how["room"])} if "room" in how else {})}
    if arm.separate:
        made.append(f"training.token={scenario.training.token * GPUS / (GPUS - rollout)}")
        if "gated" in how:
            replicas["slots"] = -(-scenario.rules.batch_samples // count)
    return dict(_simulated(model, (*made, f"replicas=[{replicas}]"), quick))


@cache
def _simulated(model: str, changes: tuple[str, ...], quick: bool) -> dict[str, float]:
    return figures(*run(load(model, changes, quick)))


def _concerns(change: str, arm: Arm) -> bool:
    if change.startswith("drafts."):
        return arm.drafts
    if change.startswith("scheduling."):
        return "preset=histopipe" in arm.changes
    return arm.planned or not change.startswith(("forecasts=", "placement."))


def compare(models: Sequence[str], seeds: int, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Every arm at its best split (of shorter epochs and one seed); what it gains, by seeds."""
    splits = SPLITS[1:3] if quick else SPLITS
    for model in models:
        runs: dict[Arm, list[dict[str, float]]] = {}
        for arm in ARMS:
            tried = {
                rollout: simulate(model, arm, rollout, ["workload.prompts=512"], quick)["step_s"]
                for rollout in (splits if arm.separate else ())
            }
            best = min(tried, key=lambda each: tried[each]) if tried else GPUS
            runs[arm] = [simulate(model, arm, best, [f"workload.seed={seed}"], quick) for seed in range(seeds)]
            means = {name: round(statistics.mean(each[name] for each in runs[arm]), 4) for name in runs[arm][0]}
            row = {"model": model, "arm": arm.name, "rollout_gpus": best, **means}
            row |= _gain("speedup", runs[arm], runs[BASELINE])
            yield {**row, "step_s_by_split": {str(gpus): round(step, 1) for gpus, step in tried.items()}}
        for (arm, other), figure in PUBLISHED.items():
            row = {"model": model, "ratio": f"{arm.name} / {other.name}", "published": figure.get(model)}
            yield {**row, **_gain("simulated", runs[arm], runs[other])}


def _gain(name: str, runs: list[dict[str, float]], others: list[dict[str, float]]) -> dict[str, Any]:
    ratios = [other["step_s"] / each["step_s"] for each, other in zip(runs, others, strict=True)]
    return {name: round(statistics.mean(ratios), 3), f"{name}_by_seed": [round(ratio, 3) for ratio in ratios]}


# ---- what stands in for what is not published ----


def fit(seeds: int, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Published figures of the setting, and what stands in for it: stock synchronous verl, and single costs."""
    for name, gpus, prompt, speed in DECODING:
        model, cost = MODELS[name], load(name, []).scenario.replicas[0]
        slower = H800 / A100 * model.gpus / gpus
        weights = (cost.step.base - model.launch) * slower + model.launch
        told = 1 / (weights + cost.step.cached * slower * (prompt + 1024))
        yield held(f"tokens/s of one request, {name}, {gpus} A100, prompt of {prompt}", speed, speed, [told])
    yield held("draft tokens accepted", 0.65, 0.79, [1 / OVERHEAD])
    changed = [_regrouped(load("32b", [f"workload.seed={seed}"], quick)) for seed in range(seeds)]
    yield held("prompts that change by two of four length groups", 0.02, 0.04, changed)
    runs = [_stock(load("32b", [*PARTS, f"workload.seed={seed}"], quick)) for seed in range(seeds)]
    yield held("share of rollout in a step, 32b", 0.84, 0.91, [share for share, _ in runs])
    yield held("share of idle replicas, 32b", 0.46, None, [idle for _, idle in runs])


def held(name: str, low: float, high: float | None, found: list[float]) -> dict[str, Any]:
    """``error``: how far the mean is outside of what was published, as a share of the nearest bound."""
    mean = statistics.mean(found)
    nearest = low if mean < low else high if high is not None and mean > high else mean
    row = {"figure": name, "published": [low, high], "simulated": round(mean, 4)}
    return {**row, "by_seed": [round(each, 4) for each in found], "error": round(mean / nearest - 1, 4)}


def _stock(loaded: cluster_file.Loaded) -> tuple[float, float]:
    """Shares of rollout in a step, and of the replicas' time in rollouts in which they have no request."""
    segments: list[tuple[str, Segment]] = []
    _, steps = run(loaded, segments)
    rollout = sum(step.rollout for step in steps)
    replicas = len(loaded.scenario.replicas)
    idle = 1 - _busy(segments, steps[0]) / (replicas * rollout)
    return rollout / sum(step.seconds for step in steps), idle


def _busy(segments: list[tuple[str, Segment]], first: Step) -> float:
    """Seconds for which replicas had a request, from a step on."""
    seconds = 0.0
    ends: dict[str, float] = {}
    for replica, segment in sorted(segments, key=lambda told: told[1].began):
        began = max(segment.began, ends.get(replica, first.began))
        if segment.ended > began:
            seconds += segment.ended - began
            ends[replica] = segment.ended
    return seconds


def _regrouped(loaded: cluster_file.Loaded) -> float:
    """Share of the prompts that are two or more of four groups of like lengths further in the second epoch."""
    means: dict[int, dict[str, float]] = {0: {}, 1: {}}
    for prompt in loaded.prompts:
        if prompt.epoch in means:
            means[prompt.epoch][prompt.key] = float(prompt.lengths.mean())
    ranks = [np.argsort(np.argsort([epoch[key] for key in means[0]])) for epoch in means.values()]
    groups = [4 * rank // len(rank) for rank in ranks]
    return float(np.mean(np.abs(groups[0] - groups[1]) >= 2))


# ---- sensitivity ----

#: What is varied, with changes; what the split of the GPUs does is told by the arms.
VARIED: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "acceptance length 1.5": ("drafts.acceptance=[1,1.5]",),
    "acceptance length 2": ("drafts.acceptance=[1,2]",),
    "replicas begin the next step's share as theirs ends": ("gated=1", "scheduling.at_version=finish"),
    "training four times as long": ("training.token=10.68e-6",),
    "lengths at 50, 90, 99%: 2600, 4900, 8300": ("workload.percentiles={50: 2600, 90: 4900, 99: 8300}",),
    "lengths at 50, 90, 99%: 2500, 9000, 15000": ("workload.percentiles={50: 2500, 90: 9000, 99: 15000}",),
    "caches of 30,000 tokens": ("room=30000",),
    "caches of 60,000 tokens": ("room=60000",),
    "responses of up to 8k": ("workload.response_limit=8192",),
    "40 s an update beside training": ("training.update=20", "training.sync=20"),
    "alike 0.9": ("workload.alike=0.9",),
    "training four times as long, acceptance length 2": ("training.token=10.68e-6", "drafts.acceptance=[1,2]"),
    "lengths known": ("forecasts=oracle",),
    "no migration": ("placement.options.migrate=false",),
}


def vary(model: str, seeds: int, quick: bool = False) -> Iterator[dict[str, Any]]:
    """The published ratios under each variation, with half of the GPUs for rollout and shorter epochs."""
    for name, changes in list(VARIED.items())[: 2 if quick else None]:
        given = ["workload.prompts=384", *changes]
        runs = {
            arm: [simulate(model, arm, GPUS // 2, [*given, f"workload.seed={seed}"], quick) for seed in range(seeds)]
            for arm in (BASELINE, ONE_TIER, TWO_TIERS, BOTH, DRAFTS)
        }
        gains = {
            f"{arm.name} / {other.name}": _gain("simulated", runs[arm], runs[other])["simulated"]
            for arm, other in [*PUBLISHED, (DRAFTS, BASELINE)]
        }
        base = runs[BASELINE]
        share = statistics.mean(each["rollout_s"] / each["step_s"] for each in base)
        preempted = statistics.mean(each["preempted"] for each in runs[TWO_TIERS])
        told = {"rollout_share": round(share, 3), "preempted": preempted}
        yield {"model": model, "varied": name, **gains, **told}


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="few prompts, one seed, no variations")] = False,
    seeds: Annotated[int, typer.Option(help="runs of each arm", min=1)] = 2,
    only: Annotated[str, typer.Option(help="fit, arms or varied")] = "",
) -> None:
    """Hold the input against what is published of the setting, then the arms, then what they depend on."""
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "fit": lambda: fit(1 if quick else seeds, quick),
        "arms": lambda: compare(list(MODELS), 1 if quick else seeds, quick),
        "varied": lambda: vary("14b", 1 if quick else seeds, quick),
    }
    for part in [only] if only else list(parts):
        for row in parts[part]():
            if as_json:
                about = {"machine": describe(), "commit": commit()}
                print(json.dumps({"benchmark": "published", "part": part, **row, **about}), flush=True)
            else:
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    app()
