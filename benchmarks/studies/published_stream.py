"""StreamRL's settings in the simulator: what its arms gain here, beside what was published.

    python -m benchmarks.studies.published_stream [--json] [--quick] [--seeds 2] [--only PART] [--model 7b]
        [--variation TEXT]

Actors of 7B, 32B and 72B with PPO, responses of up to 5k, 10k and 20k tokens (``examples/simulate/streamrl72b.yaml``).
Of StreamRL (arXiv:2504.15930) are known here its algorithms, ratios, hardware (128 H800s) and the recall of its ranker;
not its batch, length distributions, tensor parallel sizes, or how many GPUs each setting had. What stands in for these
is held against what is published of the setting itself; speed-ups are no part of that.

The ablation's baseline is the authors' own colocated system (ColocationRL), whose engine is StreamRL's; the ranges are
over verl, whose engine is another. The simulator has one engine, and so one baseline for both.
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
from benchmarks.studies.published import A100, H800, PARTS, held
from verl_rhyme.observability import slot_time
from verl_rhyme.observability.slot_time import REASONS
from verl_rhyme.simulation import cluster_file, event_log, summary
from verl_rhyme.simulation.engine import Segment
from verl_rhyme.simulation.run import Simulation

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)

CLUSTER = Path(__file__).parents[2] / "examples" / "simulate" / "streamrl72b.yaml"

#: Skewness-aware dispatch; the pools run at once, so that the slower one counts.
SKEWNESS_AWARE = "placement.policy=skewness_aware", "placement.options={objective: max}"


@dataclass(frozen=True)
class Model:
    """An actor.

    Attributes:
        profile: Of its replicas.
        gpus: Of a replica.
        weights: How many.
        all_gpus: For generation and training. Published: 128 in all, and 32 for 7B in one figure; 32B's are assumed.
        sync: Seconds of a weight transfer.
        launch: Seconds of a decoding step that do not shrink with the bandwidth, as the profile has them.
    """

    profile: str
    gpus: int
    weights: float
    all_gpus: int
    sync: float
    launch: float


MODELS = {
    "7b": Model("qwen2.5-7b-h800-tp1", 1, 7.6e9, 32, 2.0, 1.5e-3),
    "32b": Model("qwen2.5-32b-h800-tp4", 4, 32.8e9, 64, 5.0, 3.5e-3),
    "72b": Model("qwen2.5-72b-h800-tp8", 8, 72.7e9, 128, 10.0, 4.5e-3),
}
#: Longest responses; percentiles scale with them.
LIMITS = {"5k": 5120, "10k": 10240, "20k": 20480}
SHAPE = {50: 2500 / 20480, 90: 6875 / 20480, 99: 16250 / 20480}
#: FLOP of a weight and token, of actor and critic, and the share of 989 TFLOP/s that is reached.
PPO, REACHED = 18, 0.35 * 989e12

#: Decoding speed of one request as Qwen publishes it (as ``published.DECODING``): model, GPUs, prompt, tokens a second.
DECODING = [("7b", 1, 1, 84.28), ("7b", 1, 14336, 77.69), ("32b", 2, 30720, 31.82)]
DECODING += [("72b", 4, 6144, 29.90), ("72b", 4, 30720, 27.53)]


@dataclass(frozen=True)
class Arm:
    """A system: changes to the cluster file; whether rollout and training have GPUs of their own."""

    name: str
    changes: tuple[str, ...]
    separate: bool = True


def _placed(forecasts: str = "history") -> tuple[str, ...]:
    return *SKEWNESS_AWARE, f"forecasts={forecasts}"


def _stream(staleness: int) -> tuple[str, ...]:
    return "topology=separate", "preset=stream", f"max_staleness={staleness}"


COLOCATED = Arm("colocated, sync", PARTS, separate=False)
SKEWED = Arm("colocated, skewness-aware", _placed(), separate=False)
STREAM = Arm("stream, sync", (*_stream(0), *PARTS))
STREAM_SKEWED = Arm("stream, sync, skewness-aware", (*_stream(0), *_placed()))
ASYNC = Arm("stream, async", (*_stream(1), *PARTS))
ASYNC_SKEWED = Arm("stream, async, skewness-aware", (*_stream(1), *_placed()))
#: With all lengths known beforehand.
ORACLE = Arm("colocated, skewness-aware, oracle", _placed("oracle"), separate=False)
#: Engines apart, and nothing else.
APART = Arm("apart, sync", (*_stream(0), *_placed(), "streaming.part=null"))
ARMS = [COLOCATED, SKEWED, ORACLE, APART, STREAM, STREAM_SKEWED, ASYNC, ASYNC_SKEWED]
#: Shares of the GPUs that roll out where others train; each arm has the best of these.
SPLITS = (1 / 4, 3 / 8, 1 / 2, 5 / 8)

#: Published ratios of throughput, of 72B at 20k: arm, the one it is compared with, ratio.
ABLATION = [(SKEWED, COLOCATED, 1.08), (STREAM_SKEWED, COLOCATED, 1.23), (ASYNC_SKEWED, COLOCATED, 1.48)]
#: Over all models and lengths, from and to: over verl.
RANGES = [(STREAM_SKEWED, COLOCATED, (1.12, 2.12)), (ASYNC_SKEWED, COLOCATED, (1.30, 2.66))]


def changed(model: str, limit: str) -> list[str]:
    """The cluster file's changes for a model and a longest response, with all GPUs in one place."""
    kind, most = MODELS[model], LIMITS[limit]
    percentiles = {percentile: round(share * most) for percentile, share in SHAPE.items()}
    return [
        f"replicas=[{{count: {kind.all_gpus // kind.gpus}, profile: {kind.profile}}}]",
        f"training.token={PPO * kind.weights / (kind.all_gpus * REACHED)}",
        f"training.sync={kind.sync}",
        f"workload.response_limit={most}",
        f"workload.percentiles={percentiles}",
    ]


def load(model: str, limit: str, changes: Sequence[str], quick: bool = False) -> cluster_file.Loaded:
    """A cluster."""
    small = ["workload.prompts=32", "batch_prompts=16", "workload.samples=4"] if quick else []
    return cluster_file.load(CLUSTER, [*changed(model, limit), *changes, *small])


def simulate(
    model: str, limit: str, arm: Arm, split: float = 1.0, changes: Sequence[str] = (), quick: bool = False
) -> dict[str, float]:
    """One run of an arm.

    Args:
        model: Of :data:`MODELS`.
        limit: Of :data:`LIMITS`.
        arm: Of :data:`ARMS`.
        split: Share of the GPUs that roll out, where others train.
        changes: Further ones to the cluster file; those of streaming and of forecasts only where the arm has these.
        quick: A small workload.
    """
    return dict(_simulated(model, limit, _changes(model, limit, arm, split, changes), quick))


def _changes(model: str, limit: str, arm: Arm, split: float, changes: Sequence[str]) -> tuple[str, ...]:
    kind = MODELS[model]
    ours = [change for change in changes if _concerns(change, arm)]
    if arm.separate:
        token = load(
            model, limit, [each for each in ours if each.startswith("training.token=")]
        ).scenario.training.token
        rollout = max(1, round(split * kind.all_gpus / kind.gpus))
        given = {"count": rollout, "profile": kind.profile}
        ours += [
            f"replicas=[{given}]",
            f"training.token={token * kind.all_gpus / (kind.all_gpus - rollout * kind.gpus)}",
        ]
    return (*arm.changes, *ours)


@cache
def _simulated(model: str, limit: str, changes: tuple[str, ...], quick: bool) -> dict[str, float]:
    simulation, steps = run(load(model, limit, changes, quick))
    early = statistics.mean(step.early for step in steps)
    waited = statistics.mean(step.waited / step.seconds for step in steps)
    return {**figures(simulation, steps), "early": early, "trainer_waits": waited}


def _concerns(change: str, arm: Arm) -> bool:
    if change.startswith("scheduling."):  # on-policy nothing runs across versions
        return "max_staleness=1" in arm.changes
    if change.startswith(("streaming.", "training.gradients", "training.part")):
        return "preset=stream" in arm.changes
    if change.startswith("forecasts="):
        return "forecasts=history" in arm.changes
    return True


def best(
    model: str,
    limit: str,
    arm: Arm,
    changes: Sequence[str] = (),
    quick: bool = False,
    splits: Sequence[float] = SPLITS,
) -> tuple[float, dict[float, float]]:
    """The share of GPUs for rollout with the shortest step, and the steps of all shares that were tried (one seed, two
    updates an epoch)."""
    splits = (SPLITS[1:3] if quick else splits) if arm.separate else ()
    given = ["workload.prompts=256", *changes]
    tried = {split: simulate(model, limit, arm, split, given, quick)["step_s"] for split in splits}
    return (min(tried, key=lambda split: tried[split]) if tried else 1.0), tried


def ablation(seeds: int, quick: bool = False) -> Iterator[dict[str, Any]]:
    """All arms of 72B at 20k, each at its best split; the published ratios."""
    runs: dict[Arm, list[dict[str, float]]] = {}
    for arm in ARMS:
        split, tried = best("72b", "20k", arm, quick=quick)
        runs[arm] = [simulate("72b", "20k", arm, split, [f"workload.seed={seed}"], quick) for seed in range(seeds)]
        row = {"arm": arm.name, "rollout_share": split, **_means(runs[arm]), **_gain(runs[arm], runs[COLOCATED])}
        yield {**row, "step_s_by_split": {f"{share:.3f}": round(step, 1) for share, step in tried.items()}}
    for arm, other, published in ABLATION:
        yield {"ratio": f"{arm.name} / {other.name}", "published": published, **_gain(runs[arm], runs[other])}
    ratios = [known["rollout_s"] / each["rollout_s"] for each, known in zip(runs[SKEWED], runs[ORACLE], strict=True)]
    yield {"ratio": "rollout with lengths known / with forecasts", "published": 0.95, **_told(ratios)}


def settings(models: Sequence[str], quick: bool = False) -> Iterator[dict[str, Any]]:
    """The published ranges: every model and limit, one seed, and what the best split gains over an even one."""
    gains: dict[str, list[float]] = {arm.name: [] for arm, _, _ in RANGES}
    for model in models:
        for limit in LIMITS:
            base = simulate(model, limit, COLOCATED, quick=quick)
            row: dict[str, Any] = {"model": model, "limit": limit, "colocated_step_s": round(base["step_s"], 1)}
            row["colocated_rollout_share"] = round(base["rollout_s"] / base["step_s"], 3)
            row["skewness-aware"] = round(base["step_s"] / simulate(model, limit, SKEWED, quick=quick)["step_s"], 3)
            for arm, _, _ in RANGES:
                split, tried = best(model, limit, arm, quick=quick)
                gain = base["step_s"] / simulate(model, limit, arm, split, quick=quick)["step_s"]
                gains[arm.name].append(gain)
                even = tried[0.5] / min(tried.values())
                row |= {arm.name: round(gain, 3), f"{arm.name}, split": split, f"{arm.name}, even": round(even, 3)}
            yield row
    for arm, other, published in RANGES:
        low, high = min(gains[arm.name]), max(gains[arm.name])
        row = {"ratio": f"{arm.name} / {other.name}", "published": list(published)}
        yield {**row, "simulated": [round(low, 3), round(high, 3)]}


def told_apart(quick: bool = False) -> Iterator[dict[str, Any]]:
    """72B at 20k: why slots stand empty, as in the report page, and where the trainer's time goes; of the whole run,
    one seed, a quarter of the GPUs for rollout where it has its own."""
    for arm in (COLOCATED, SKEWED, APART, STREAM_SKEWED, ASYNC_SKEWED):
        loaded = load("72b", "20k", _changes("72b", "20k", arm, SPLITS[0], ()), quick)
        segments: list[tuple[str, Segment]] = []
        simulation = Simulation(loaded.scenario, loaded.prompts, loaded.updates, segments)
        simulation.run()
        log = event_log.columns(simulation, segments, loaded.epoch_prompts)
        measured = slot_time.measure(*log, loaded.scenario.slots, runs_on=not loaded.scenario.rests)
        assert measured is not None
        whole = summary.whole(simulation)
        slots = {name: round(float(share), 3) for name, share in zip(REASONS, measured.shares, strict=True)}
        trainer = {name: round(share, 3) for name, share in whole.items() if name.startswith(("trainer_", "early"))}
        yield {"arm": arm.name, "slots": slots, **trainer, "step_s": round(whole["step_s"], 1)}


def _means(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.mean(each[name] for each in runs), 4) for name in runs[0]}


def _gain(runs: list[dict[str, float]], others: list[dict[str, float]]) -> dict[str, Any]:
    return _told([other["step_s"] / each["step_s"] for each, other in zip(runs, others, strict=True)])


def _told(ratios: list[float]) -> dict[str, Any]:
    return {"simulated": round(statistics.mean(ratios), 3), "by_seed": [round(ratio, 3) for ratio in ratios]}


# ---- what stands in for what is not published ----


def fit(seeds: int, quick: bool = False) -> Iterator[dict[str, Any]]:
    """Published figures of the setting, and what stands in for it: the colocated system, and single costs."""
    for name, gpus, prompt, speed in DECODING:
        model, cost = MODELS[name], load(name, "20k", []).scenario.replicas[0]
        slower = H800 / A100 * model.gpus / gpus
        weights = (cost.step.base - model.launch) * slower + model.launch
        told = 1 / (weights + cost.step.cached * slower * (prompt + 1024))
        yield held(f"tokens/s of one request, {name}, {gpus} A100, prompt of {prompt}", speed, speed, [told])
    for share, recall in ((0.2, 0.87), (0.1, 0.82), (0.05, 0.76)):
        found = [_recall(load("72b", "20k", [f"workload.seed={seed}"], quick), share) for seed in range(seeds)]
        yield held(f"recall of the longest {share:.0%}", recall, recall, found)
    runs = [simulate("72b", "20k", COLOCATED, 1.0, [f"workload.seed={seed}"], quick) for seed in range(seeds)]
    yield held(
        "seconds of an iteration, 72b at 20k, of which 10 s are less than 2%", 500, None, [r["step_s"] for r in runs]
    )


def _recall(loaded: cluster_file.Loaded, share: float) -> float:
    """Of the longest samples of the second epoch, those whose prompts had the longest mean in the first."""
    lengths: list[dict[str, np.ndarray]] = [{}, {}]
    for prompt in loaded.prompts:
        lengths[prompt.epoch][prompt.key] = prompt.lengths
    before = np.array([[lengths[0][key].mean()] * len(lengths[1][key]) for key in lengths[0]]).ravel()
    after = np.array([lengths[1][key] for key in lengths[0]]).ravel()
    count = int(share * len(after))
    return len(np.intersect1d(np.argsort(-before)[:count], np.argsort(-after)[:count])) / count


# ---- sensitivity ----

#: What is varied, with changes; 72B at 20k.
VARIED: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "samples run to their end under one version": ("scheduling.at_version=finish",),
    "gradients wait for the whole batch": ("training.gradients=false",),
    "training twice as long": ("training.token=5.9e-5",),
    "training half as long": ("training.token=1.475e-5",),
    "lengths at 50, 90, 99%: 2500, 9000, 18000": ("workload.percentiles={50: 2500, 90: 9000, 99: 18000}",),
    "lengths at 50, 90, 99%: 2500, 5000, 9000": ("workload.percentiles={50: 2500, 90: 5000, 99: 9000}",),
    "alike 0.6": ("workload.alike=0.6",),
    "1,024 samples an update": ("batch_prompts=64",),
    "5 s a part": ("training.part=5",),
    "parts of a thirty-second": ("streaming.part=0.03125",),
    "4,096 samples an update": ("batch_prompts=256",),
    "lengths at 50, 90, 99%: 8000, 14000, 19000": ("workload.percentiles={50: 8000, 90: 14000, 99: 19000}",),
    "lengths known": ("forecasts=oracle",),
}


def vary(quick: bool = False, only: str = "") -> Iterator[dict[str, Any]]:
    """The ablation under each variation that has ``only`` in its name: one seed, arms at the better of two splits."""
    varied = [(name, changes) for name, changes in VARIED.items() if only in name]
    for name, changes in varied[: 2 if quick else None]:
        row: dict[str, Any] = {"varied": name}
        base = simulate("72b", "20k", COLOCATED, 1.0, changes, quick)
        row["rollout_share"] = round(base["rollout_s"] / base["step_s"], 3)
        for arm, _, _ in ABLATION:
            split, _ = best("72b", "20k", arm, changes, quick, SPLITS[:2])
            row[arm.name] = round(base["step_s"] / simulate("72b", "20k", arm, split, changes, quick)["step_s"], 3)
        yield row


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="few prompts, one seed, two variations")] = False,
    seeds: Annotated[int, typer.Option(help="runs of each arm", min=1)] = 2,
    only: Annotated[str, typer.Option(help="fit, arms, told, settings or varied")] = "",
    model: Annotated[str, typer.Option(help="of settings; all of them where none is named")] = "",
    variation: Annotated[str, typer.Option(help="of varied, those whose name has this in it")] = "",
) -> None:
    """Hold the input against what is published of the setting, then the ablation, the ranges, what they depend on."""
    seeds = 1 if quick else seeds
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "fit": lambda: fit(seeds, quick),
        "arms": lambda: ablation(seeds, quick),
        "told": lambda: told_apart(quick),
        "settings": lambda: settings([model] if model else list(MODELS), quick),
        "varied": lambda: vary(quick, variation),
    }
    for part in [only] if only else list(parts):
        for row in parts[part]():
            if as_json:
                about = {"machine": describe(), "commit": commit()}
                print(json.dumps({"benchmark": "published_stream", "part": part, **row, **about}), flush=True)
            else:
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    app()
