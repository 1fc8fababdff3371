"""The simulator held against real runs: fitted on one, it predicts others' step times and bubble ratios.

    python -m benchmarks.studies.simulator [--json] [--quick] [--train] [--keep] [--speed] [--out DIR] [CASE ...]

Real verl, vLLM and GRPO on the tiny world. A decoding step takes at least 75 ms and an update of the actor 3.5 s
(:mod:`benchmarks.steady_step`), as on GPUs of their own: this machine's cores are shared by all replicas. From
the fitted run come the costs of steps and trainer; from the predicted one the responses' lengths and, in one of two
rows, their acceptance lengths; in the other these, too, are the fitted run's, by epoch. What chance decides (which of
two equally loaded replicas a request gets, where a prompt's hash falls) is drawn anew sixteen times: mean and standard
deviation. The first step of a run, in which all is warmed up, is not counted.

``--train`` makes the runs first, four minutes each; without it they are read from ``--out``. ``--quick`` takes the
small logs in ``benchmarks/traces/simulator``, where ``--keep`` puts them. ``--speed`` times a million requests.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer

from benchmarks import tiny_run
from benchmarks.machine import commit, describe
from benchmarks.tiny_run import RHYME
from verl_rhyme.config import OVERSUBSCRIPTION
from verl_rhyme.observability import events, metrics, steps
from verl_rhyme.planning.cost import ReplicaCost, StepCost, TrainingCost
from verl_rhyme.scheduling.rules import LOADED_BATCHES, Rules
from verl_rhyme.simulation import fitted, recorded
from verl_rhyme.simulation.run import Simulation
from verl_rhyme.simulation.scenario import Drafts, Scenario
from verl_rhyme.simulation.workload import Lengths

LOGS = Path(__file__).parents[1] / "traces" / "simulator"

SAMPLES, SLOTS, LIMIT, EPOCHS, DRAWS = 4, 8, 384, 2, 16
STEADY_MS, UPDATE_S = 75, 3.5
FIT = "fit"


@dataclass(frozen=True)
class Case:
    """A run: ``rules`` over its update batch, ``env`` and ``overrides`` of the recipe that say the same."""

    rules: dict[str, Any]
    seed: int
    env: dict[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    replicas: int = 2
    batch: int = 8
    placement: str = "least_loaded"
    slots: int = SLOTS
    forecast: bool = True  # prompts start, and requests are placed, by expected lengths

    def made(self) -> Rules:
        return Rules(batch_prompts=self.batch, batch_samples=self.batch * SAMPLES, **self.rules)

    @property
    def limit(self) -> int | None:
        """Of samples that the engines are given; verl's own schedule gives them all."""
        return math.ceil(OVERSUBSCRIPTION * self.replicas * self.slots) if self.made().batches > 1 else None


_SORTED: dict[str, Any] = {"max_staleness": 0, "in_flight": 2, "refill": "when_empty"}
_SORTED_ENV = {"RHYME": "sorted", "STALENESS": "0"}
_SORTED_LOAD = f"{RHYME}.scheduling.in_flight=2"
CASES = {
    # without forecasts: the logs that are kept were made when prompts started as they were loaded
    "fit": Case(_SORTED, 1, _SORTED_ENV, (_SORTED_LOAD,), forecast=False),
    "no drafts": Case(_SORTED, 3, _SORTED_ENV, (_SORTED_LOAD, f"{RHYME}.drafting.enable=false"), forecast=False),
    "sync": Case({"max_staleness": 0}, 6, {"RHYME": "histospec"}, forecast=False),
    "full, on-policy": Case(
        {"max_staleness": 0, "in_flight": LOADED_BATCHES, "refill": "when_empty"},
        seed=2,
        env={"RHYME": "full", "STALENESS": "0"},
        placement="longest_first",
    ),
    "full, separate engines": Case(
        {"max_staleness": 2, "separate": True, "relayed": True},
        seed=8,
        env={"RHYME": "full", "STALENESS": "2", "MODE": "separate_async"},
        overrides=(f"{RHYME}.streaming.part=null",),
        placement="longest_first",
    ),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def train(case: Case, folder: Path) -> None:
    """Make a run."""
    settings = {"EPOCHS": EPOCHS, "PROMPTS": 4 * case.batch, "SEED": case.seed, "REPLICAS": case.replicas}
    env = {**{name: str(value) for name, value in settings.items()}, **case.env}
    sizes = tiny_run.sizes(case.batch, SAMPLES, SLOTS, case.replicas)
    tiny_run.train(folder, env, [*sizes, "trainer.save_freq=1000", *case.overrides], STEADY_MS, UPDATE_S, timeout=900)


def measured(folder: Path, case: Case) -> dict[str, Any]:
    """Means over a run's steps after the first; the bubble ratio is of the rollouts' seconds, or of all."""
    rows = [row for _, row in sorted(steps.from_metrics(folder / "metrics.jsonl").items())][1:]
    took = np.array([row[metrics.STEP_S] - row.get("timing_s/save_checkpoint", 0.0) for row in rows])
    rollout = np.array([row[metrics.GEN_S] for row in rows])
    bubble = np.average([row[metrics.BUBBLE_RATIO] for row in rows], weights=rollout)
    if case.made().separate:
        bubble = _idle(recorded.read(folder), case.replicas * SLOTS)
    return {"step_s": float(took.mean()), "rollout_s": float(rollout.mean()), "bubble_ratio": float(bubble)}


def _idle(run: recorded.Run, slots: int) -> float:
    """Share of the slots that were idle from the first update's end to the last harvest.

    Where engines run on, the trainer's metric takes a sample for running as soon as it is started, though it queue at
    one replica while another has slots to spare; the simulated one does not.
    """
    ends = run.stages["started_at"] + run.stages["duration_s"]
    began = ends[(run.stages["stage"] == "step") & (run.stages["step"] == run.stages["step"].min())].max()
    ended = ends[run.stages["stage"] == "gen"].max()
    requests = recorded.requests(run)
    busy = (np.minimum(requests.finished, ended) - np.maximum(requests.started, began)).clip(min=0).sum()
    return float(1 - busy / (slots * (ended - began)))


def predicted(
    case: Case, fit: fitted.Fitted, run: recorded.Run, own: bool, first: int = 1, draws: int | None = None
) -> dict[str, tuple[float, float]]:
    """The same, simulated: mean and standard deviation over :data:`DRAWS`.

    Args:
        case: The predicted run's.
        fit: What the fitted run tells.
        run: The predicted one, for its lengths.
        own: Go by its own acceptance lengths, too.
        first: So many steps are not counted.
        draws: By default :data:`DRAWS`.
    """
    rules = case.made()
    cost = ReplicaCost(fit.steps.step, fit.steps.prefill, slots=case.slots)
    drafts = recorded.acceptance(run)
    if drafts != Drafts() and not own:
        drafts = fit.drafts
    prompts = [prompt if own else prompt.unpaced() for prompt in recorded.prompts(run)]
    found: dict[str, list[float]] = {"step_s": [], "rollout_s": [], "bubble_ratio": []}
    for draw in range(draws or DRAWS):
        scenario = Scenario(
            replicas=(cost,) * case.replicas,
            rules=rules,
            training=fit.training,
            colocated=not rules.separate,
            placement=case.placement,
            options={"seed": draw} if case.placement == "least_loaded" else {},
            drafts=drafts,
            limit=case.limit,
            lot=1 if case.limit is None else max(1, (case.limit - case.replicas * case.slots) // 2),
            forecasts="history" if case.forecast else "none",
            response_limit=LIMIT,
        )
        shuffled = [prompt._replace(key=f"{draw}/{prompt.key}") for prompt in prompts]
        rows = Simulation(scenario, shuffled).run()[first:]
        found["step_s"].append(float(np.mean([row.seconds for row in rows])))
        found["rollout_s"].append(float(np.mean([row.rollout for row in rows])))
        weights = [row.seconds if rules.separate else row.rollout for row in rows]
        found["bubble_ratio"].append(float(np.average([row.bubble for row in rows], weights=weights)))
    return {name: (float(np.mean(values)), float(np.std(values))) for name, values in found.items()}


def compare(name: str, folder: Path, fit: fitted.Fitted, own: bool) -> dict[str, Any]:
    """One row: what a run took, what was predicted, and the relative error."""
    case = CASES[name]
    run = recorded.read(folder)
    real = measured(folder, case)
    told = predicted(case, fit, run, own)
    row: dict[str, Any] = {"case": name, "acceptance": "own" if own else "fitted", "replicas": case.replicas}
    for what, value in real.items():
        mean, deviation = told[what]
        row |= {what: _short(value), f"{what}_predicted": _short(mean), f"{what}_deviation": _short(deviation)}
        row[f"{what}_error"] = round(mean / value - 1, 4)
    return row


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _told(row: dict[str, Any]) -> str:
    parts = [
        f"{what} {row[what]:.3g}, predicted {row[f'{what}_predicted']:.3g} ({row[f'{what}_error']:+.1%})"
        for what in ("step_s", "rollout_s", "bubble_ratio")
    ]
    return f"{row['case']:24} {row['acceptance']:7} {'; '.join(parts)}"


def keep(folder: Path, to: Path) -> None:
    """What this module reads of a run, in two compressed files and a few lines: for ``--quick``."""
    log = recorded.read(folder).folder
    (to / "events").mkdir(parents=True, exist_ok=True)
    requests, stages = events.read_requests(log), events.read_stages(log)
    uids = {uid: str(i) for i, uid in enumerate(dict.fromkeys(requests["uid"].to_pylist()))}
    requests = requests.set_column(2, "uid", [pa.array([uids[uid] for uid in requests["uid"].to_pylist()])])
    for kind, table in (("requests", requests.drop_columns(["node"])), ("stages", stages)):
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        path = to / "events" / f"{kind}-000001-001-000000.arrow"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema, options=options) as writer:
            writer.write_table(table.combine_chunks())
    (to / "events" / events.INFO_FILE).write_text((log / events.INFO_FILE).read_text())
    names = (metrics.EPOCH, metrics.STEP_S, metrics.GEN_S, metrics.BUBBLE_RATIO, "timing_s/save_checkpoint")
    rows = sorted(steps.from_metrics(folder / "metrics.jsonl").items())
    lines = [{"step": step, "data": {name: row[name] for name in names if name in row}} for step, row in rows]
    (to / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def speed(replicas: int, prompts: int, samples: int, batches: int) -> dict[str, Any]:
    """Processor time of a synchronous run, prompts and forecasts included."""
    lengths = Lengths({50: 2000, 90: 8000, 99: 18000}, 20480)
    cost = ReplicaCost(StepCost(base=0.012, row=2e-5, cached=1e-8), prefill=5e-5, slots=256, room=800_000)
    rules = Rules(batch_prompts=prompts, batch_samples=prompts * samples, max_staleness=0)
    scenario = Scenario((cost,) * replicas, rules, TrainingCost(token=2e-6, sync=5.0), response_limit=20480)
    began = time.process_time()
    simulation = Simulation(scenario, lengths.epochs(prompts * batches, samples, 1, 500))
    requests = sum(step.samples for step in simulation.run())
    seconds = time.process_time() - began
    row = {"replicas": replicas, "requests": requests, "events": simulation.cluster.events}
    return {**row, "seconds": round(seconds, 1), "us_per_request": round(seconds / requests * 1e6, 1)}


@app.command()
def main(
    cases: Annotated[list[str] | None, typer.Argument(help="default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="the logs that are kept, half a minute")] = False,
    make: Annotated[bool, typer.Option("--train", help="make the runs first")] = False,
    kept: Annotated[bool, typer.Option("--keep", help="keep the runs' logs for --quick")] = False,
    timed: Annotated[bool, typer.Option("--speed", help="instead: a million requests on 1,024 replicas")] = False,
    out: Annotated[Path, typer.Option(help="where the runs are kept")] = Path("runs/simulator"),
) -> None:
    """Train, fit, predict, print."""
    chosen = cases or [name for name in CASES if not quick or _folder(LOGS, name).is_dir()]
    if unknown := sorted(set(chosen) - set(CASES)):
        raise typer.BadParameter(f"no case {', '.join(unknown)}; there are: {', '.join(CASES)}")
    top = LOGS if quick else out.absolute()
    if make:
        for name in chosen:
            train(CASES[name], _folder(top, name))
    if kept:
        for name in chosen:
            keep(_folder(top, name), _folder(LOGS, name))
    about: dict[str, Any] = {"benchmark": "simulator", "machine": describe(), "commit": commit()}
    if timed:
        row = speed(*((128, 1024, 16, 2) if quick else (1024, 8192, 16, 8)))
        print(json.dumps({**about, **row}) if as_json else row)
        return
    about |= {"draws": DRAWS}
    missing = [name for name in chosen if not _folder(top, name).is_dir()]
    if missing:
        typer.echo(f"left out, for --train did not make them: {', '.join(missing)}", err=True)
    if not _folder(top, FIT).is_dir():
        raise typer.BadParameter(f"no run of the case {FIT!r}, which others are predicted from, in {top}")
    fit = fitted.fit(recorded.read(_folder(top, FIT)))
    row = {"case": FIT, "requests": fit.steps.requests, "error": _short(fit.steps.error)}
    row |= {"worst": _short(fit.steps.worst), **{k: _short(v) for k, v in vars(fit.steps.step).items()}}
    row |= {f"training_{k}": _short(v) for k, v in vars(fit.training).items() if v is not None}
    print(json.dumps({**about, "fit": True, **row}) if as_json else f"fitted: {row}", flush=True)
    for name in (name for name in chosen if name not in missing):
        for own in (True, False):
            row = compare(name, _folder(top, name), fit, own)
            print(json.dumps({**about, **row}) if as_json else _told(row), flush=True)


def _folder(top: Path, name: str) -> Path:
    return top / name.replace(",", "").replace(" ", "_")


if __name__ == "__main__":
    app()
