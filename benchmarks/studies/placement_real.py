"""Placement by forecasts through the real stack: stock verl, the router's policies, HistoPipe and ours, side by side.

    python -m benchmarks.studies.placement_real [--json] [--quick] [--arm ARM] [--runs N] [--repeats N] [--out DIR]
        [SETTING ...]

Real verl, vLLM and GRPO on the tiny world, two or three replicas of four slots, updates of three or four times as many
samples. Arms take turns; each run is one seed's, a few minutes long, and its row is kept in ``--out``: started again,
what is there is not run again, so that ``--runs 1`` goes on by one run. With no run left to make, or ``--runs 0``, it
shows what there is: every run's row, and for each arm the medians over its runs.

Steady settings: a decoding step takes at least 60 ms and an update of the actor 3 s
(:mod:`benchmarks.steady_step`), as on GPUs of their own; bare ones leave the replicas to share this machine's
cores. All arms but ``stock`` draft; that one, which takes four times as long, trains two epochs and not three. Policies
that reckon with costs know those of the setting's first run with drafts. Figures are of the steps from the second epoch
on: in the first there is no history to forecast by. Arms with ``eager`` in their name move each response once
(``tests/e2e/eager_moves.py``), so that there is something to check; their seconds are no placement's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import tiny_run
from benchmarks.machine import commit, describe
from benchmarks.real_run import Cell, Kept, faults, short
from benchmarks.tiny_run import RHYME, ROLLOUT
from verl_rhyme.observability import metrics, slot_time, steps
from verl_rhyme.simulation import fitted, recorded

SAMPLES, SLOTS, LIMIT, EPOCHS, STEPS_AN_EPOCH = 4, 4, 384, 3, 3
STEADY_MS, UPDATE_S, TEMPERATURE = 60, 3.0, 0.6
EAGER = Path(__file__).parents[2] / "tests" / "e2e"


@dataclass(frozen=True)
class Setting:
    replicas: int
    bare: bool = False
    repeats: int = 2

    @property
    def batch(self) -> int:
        """Prompts of an update: shared by all replicas, which train as well."""
        return {2: 8, 3: 9}[self.replicas]


@dataclass(frozen=True)
class Arm:
    system: str = "histopipe"
    policy: str | None = None
    across: bool = False
    eager: bool = False
    epochs: int = EPOCHS
    overrides: tuple[str, ...] = ()

    def settings(self, setting: Setting) -> dict[str, str]:
        told = {"RHYME": self.system, "REPLICAS": str(setting.replicas)}
        told |= {"MODE": "separate_async"} if self.across else {}
        told |= {"STALENESS": str(int(self.across))} if self.system == "histopipe" else {}
        return told | ({"VERL_USE_EXTERNAL_MODULES": "eager_moves"} if self.eager else {})

    def changes(self, profile: Path | None) -> list[str]:
        policy = [] if self.policy is None else [f"{RHYME}.placement.policy={self.policy}"]
        if profile is not None and self.policy in ("histopipe", "makespan"):
            policy.append(f"{RHYME}.placement.profile={profile}")
        return [*policy, *self.overrides]


_EAGER = (f"+{RHYME}.placement.options.tail=1.0",)
DRAFTED = "stock, drafts"
ARMS = {
    DRAFTED: Arm("histospec"),
    "stock": Arm("histospec", epochs=2, overrides=(f"{RHYME}.drafting.enable=false",)),
    **{name: Arm(policy=name) for name in ("least_loaded", "sticky_group", "longest_first", "histopipe", "makespan")},
    **{f"across: {name}": Arm(policy=name, across=True) for name in ("least_loaded", "histopipe", "makespan")},
    "histopipe, eager": Arm(policy="histopipe", eager=True, overrides=_EAGER),
    "across: histopipe, eager": Arm(policy="histopipe", across=True, eager=True, overrides=_EAGER),
}
SETTINGS = {
    "2 replicas": Setting(2, repeats=3),
    "3 replicas": Setting(3),
    "2 replicas, bare": Setting(2, bare=True),
    "3 replicas, bare": Setting(3, bare=True),
}
#: Run once, in the first setting.
CHECKS = tuple(name for name, arm in ARMS.items() if arm.eager)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def cells(settings: Iterable[str], repeats: int | None = None) -> Iterator[Cell]:
    """Runs in their order: by repeats, in each by settings, in each all arms."""
    chosen = {name: SETTINGS[name] for name in settings}
    for seed in range(1, 1 + max(repeats or setting.repeats for setting in chosen.values())):
        for name, setting in chosen.items():
            if seed <= (repeats or setting.repeats):
                checked = name == next(iter(SETTINGS)) and seed == 1
                yield from (Cell(name, arm, seed) for arm in ARMS if checked or arm not in CHECKS)


def train(cell: Cell, out: Path) -> None:
    """Make a run."""
    setting, arm = SETTINGS[cell.setting], ARMS[cell.arm]
    settings = {"EPOCHS": str(arm.epochs), "PROMPTS": str(STEPS_AN_EPOCH * setting.batch), "SEED": str(cell.seed)}
    overrides = [
        *tiny_run.sizes(setting.batch, SAMPLES, SLOTS, setting.replicas),
        *(f"{ROLLOUT}.temperature={TEMPERATURE}", "trainer.save_freq=-1"),
        *arm.changes(profile(cell, out)),
    ]
    step_ms, update_s = (None, None) if setting.bare else (STEADY_MS, UPDATE_S)
    modules = [EAGER] if arm.eager else []
    folder = cell.folder(out)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that did not come to its end
    settings |= arm.settings(setting)
    tiny_run.train(folder, settings, overrides, step_ms, update_s, modules, timeout=590)


def profile(cell: Cell, out: Path) -> Path | None:
    """What steps cost in the setting's first run with drafts; ``None``: there is none yet."""
    first = Cell(cell.setting, DRAFTED, 1).folder(out)
    path = first / "profile.yaml"
    if not path.exists():
        try:
            path.write_text(fitted.yaml(fitted.fit(recorded.read(first), cell.setting)))
        except recorded.RunError:
            return None
    return path


def measure(cell: Cell, folder: Path) -> dict[str, Any]:
    """Figures of a run, from the second epoch on, and what :func:`.real_run.faults` finds in all of it."""
    setting, arm = SETTINGS[cell.setting], ARMS[cell.arm]
    by_step = sorted(steps.from_metrics(folder / "metrics.jsonl").items())
    run = recorded.read(folder)
    slots, samples = setting.replicas * SLOTS, setting.batch * SAMPLES
    counted = [row for step, row in by_step if step > STEPS_AN_EPOCH]

    def column(name: str, of: list[dict[str, Any]] = counted) -> np.ndarray:
        return np.array([row.get(name, np.nan) for row in of], dtype=float)

    seconds = column(metrics.STEP_S)
    tokens = column(metrics.RESPONSE_LENGTH_MEAN) * samples
    measured = slot_time.measure(run.requests, run.stages, slots, runs_on=arm.across)
    assert measured is not None, "a run without requests has no metrics"
    windows = [window for window in measured.windows if window.step > STEPS_AN_EPOCH]
    span = sum(window.ended - window.began for window in windows)
    epochs = [[row for _, row in by_step[at : at + STEPS_AN_EPOCH]] for at in range(0, len(by_step), STEPS_AN_EPOCH)]
    whole = [row for _, row in by_step]
    accepted, verified = (column(name).sum() for name in (metrics.SPEC_ACCEPTED, metrics.SPEC_VERIFY_STEPS))
    figures: dict[str, Any] = {
        "step_s": float(np.median(seconds)),
        "rollout_s": span / len(windows),
        "tokens_per_s": tokens.sum() / seconds.sum(),
        "tokens_per_rollout_s": tokens.sum() / span,
        "bubble_ratio": sum(sum(window.idle) for window in windows) / (slots * span),
        "acceptance_length": 1 + accepted / verified if verified > 0 else 1.0,
        "length_correlation": float(column(metrics.LENGTH_CORRELATION).mean()),
        "moved": int(np.nansum(column(metrics.PLACEMENT_MOVED, whole))),
        "staleness_max": int(column(metrics.STALENESS_MAX, whole).max()),
        "pearson_least": float(column("training/rollout_actor_probs_pearson_corr", whole).min()),
        "probability_difference_max": float(column("training/rollout_probs_diff_max", whole).max()),
    }
    shown: dict[str, Any] = {name: short(value) for name, value in figures.items()}
    shown["steps_s"] = [short(value) for value in seconds]
    shown["response_length"] = [short(column(metrics.RESPONSE_LENGTH_MEAN, rows).mean()) for rows in epochs]
    shown["reward"] = [short(column(metrics.REWARD_MEAN, rows).mean()) for rows in epochs]
    return {
        "setting": cell.setting,
        "arm": cell.arm,
        "seed": cell.seed,
        **shown,
        **faults(run, dict(by_step), samples, LIMIT, staleness=int(arm.across)),
    }


def medians(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each setting and arm: medians over its runs (of step seconds: over all their steps), and of some the least
    and greatest run."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["setting"], row["arm"]), []).append(row)
    for setting, arm in sorted(groups, key=lambda key: (list(SETTINGS).index(key[0]), list(ARMS).index(key[1]))):
        runs = groups[setting, arm]
        merged: dict[str, Any] = {"setting": setting, "arm": arm, "runs": len(runs)}
        for name, first in runs[0].items():
            if name in ("setting", "arm", "seed", "steps_s", "faults", *_ABOUT):
                continue
            values = np.array([np.nan if run[name] is None else run[name] for run in runs], dtype=float)
            if isinstance(first, list):
                merged[name] = [short(value) for value in np.median(values, axis=0)]
            elif name in ("moved", "spanning"):
                merged[name] = int(values.sum())
            elif name == "staleness_max":
                merged[name] = int(values.max())
            elif name == "probability_difference_max":
                merged[name] = short(values.max())
            elif name == "pearson_least":
                merged[name] = short(values.min())
            else:
                merged[name] = short(np.median(values))
                if name in ("step_s", "tokens_per_s", "bubble_ratio"):
                    merged[f"{name}_range"] = [short(values.min()), short(values.max())]
        seconds = [second for run in runs for second in run["steps_s"]]
        merged |= {"step_s": short(np.median(seconds)), "step_s_mean": short(np.mean(seconds))}
        merged["faults"] = sum(len(run["faults"]) for run in runs)
        yield merged


_ABOUT = ("benchmark", "machine", "commit")


def _told(row: dict[str, Any]) -> str:
    which = f"{row['setting']:18} {row['arm']:26} " + (
        f"seed {row['seed']}" if "seed" in row else f"{row['runs']} runs"
    )
    return (
        f"{which}: step {row['step_s']} s, {row['tokens_per_s']} tokens/s, bubble {row['bubble_ratio']}, length "
        f"{row['response_length']}, reward {row['reward']}, moved {row['moved']}, faults {row['faults'] or 'none'}"
    )


@app.command()
def main(
    settings: Annotated[list[str] | None, typer.Argument(help="default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="two arms, one seed (six minutes)")] = False,
    arm: Annotated[list[str] | None, typer.Option(help="may be given again; default: all")] = None,
    runs: Annotated[int | None, typer.Option(help="to make at most; 0: only show what there is")] = None,
    repeats: Annotated[int | None, typer.Option(help="of each arm")] = None,
    out: Annotated[Path, typer.Option(help="where the runs are kept")] = Path("runs/placement_real"),
) -> None:
    """Train, measure, print."""
    chosen = settings or list(SETTINGS)
    if unknown := sorted(set(chosen) - set(SETTINGS)):
        raise typer.BadParameter(f"no setting {', '.join(unknown)}; there are: {', '.join(SETTINGS)}")
    if unknown := sorted(set(arm or ()) - set(ARMS)):
        raise typer.BadParameter(f"no arm {', '.join(unknown)}; there are: {'; '.join(ARMS)}")
    wanted = [cell for cell in cells(chosen, repeats) if not arm or cell.arm in arm]
    if quick:
        wanted = [cell for cell in wanted if cell.seed == 1 and cell.arm in (DRAFTED, "makespan")][:2]
    kept = Kept(out)
    about = dict(zip(_ABOUT, ("placement_real", describe(), commit()), strict=True))

    def make(cell: Cell) -> dict[str, Any]:
        train(cell, out)
        return {**about, **measure(cell, cell.folder(out))}

    shown = kept.complete(wanted, runs, make, lambda row: as_json or print(_told(row), flush=True))
    if shown is None:
        return
    for row in [*(shown if as_json else []), *({**about, "median": True, **row} for row in medians(shown))]:
        print(json.dumps(row) if as_json else _told(row), flush=True)


if __name__ == "__main__":
    app()
