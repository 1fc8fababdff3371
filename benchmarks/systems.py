"""All systems side by side through the real stack: stock verl, sorted, histopipe, stream, full, on as many devices.

    python -m benchmarks.systems [--json] [--quick] [--arm ARM] [--runs N] [--repeats N] [--out DIR] [SETTING ...]

Real verl, vLLM and GRPO on the tiny world, three devices: engines and training on all three, or engines on two and
training on the third. Arms take turns; each run is one seed's, and its row is kept in ``--out``: started again, what is
there is not run again, so that ``--runs 1`` goes on by one run. With no run left to make, or ``--runs 0``, it shows
what there is: every run's row, and for each arm the medians over its runs.

In the steady setting a decoding step takes at least 60 ms, and training a sample 150 ms of one device, a third of it
more for its old log-probability (:mod:`benchmarks.steady_step`), as on GPUs of their own: engines apart then wait for
the trainer. In the rollout-bound one it is 150 and 190 ms: rollout takes more than two thirds of a synchronous step, as
it does for users, and devices that share cores disturb each other less. Bare, all share this machine's cores.

Arms without drafts, which take four times as long, train two epochs, others four, or three where rollout-bound. Figures
are of the steps from the second epoch on. Time to a reward is of the whole run, from its first step to the end of the
first epoch whose mean reward is at least that.
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
from verl_rhyme.simulation import recorded

DEVICES, BATCH, SAMPLES, SLOTS, LIMIT, EPOCHS, STEPS_AN_EPOCH = 3, 9, 4, 6, 384, 4, 4
TEMPERATURE = 0.6
#: Mean reward over an epoch's updates.
REWARDS = (0.36, 0.40, 0.44)
#: verl's own bound of staleness (``max_off_policy_threshold``).
VERLS = 8


@dataclass(frozen=True)
class Clock:
    """Milliseconds that a decoding step takes at least, and training a sample on one device; epochs at most."""

    step_ms: float | None = None
    train_ms: float | None = None
    epochs: int = EPOCHS


SETTINGS = {"steady": Clock(60, 150), "rollout-bound": Clock(150, 190, 3), "bare": Clock()}


@dataclass(frozen=True)
class Arm:
    """``apart``: engines have two of the devices, and train on the third; ``stale``: the bound of staleness."""

    system: str
    apart: bool = True
    stale: int = 1
    epochs: int = EPOCHS
    variables: tuple[tuple[str, str], ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        return DEVICES - 1 if self.apart else DEVICES

    @property
    def ranks(self) -> int:
        return 1 if self.apart else DEVICES

    def settings(self) -> dict[str, str]:
        mode = {"MODE": "separate_async"} if self.apart else {}
        return {"RHYME": self.system, "REPLICAS": str(self.replicas), **mode, **dict(self.variables)}


_UNDRAFTED = (f"{RHYME}.drafting.enable=false",)
_SYNC = (("STREAM_MODE", "sync"),)
ARMS = {
    "sync": Arm("histospec", apart=False, stale=0, epochs=2, overrides=_UNDRAFTED),
    "separate_async": Arm("histospec", stale=VERLS, epochs=2, overrides=_UNDRAFTED),
    "sync, drafts": Arm("histospec", apart=False, stale=0),
    "separate_async, drafts": Arm("histospec", stale=VERLS),
    "sorted, partial": Arm("sorted", variables=(("SORTED_MODE", "partial"),)),
    "histopipe": Arm("histopipe"),
    "stream, sync, whole": Arm("stream", stale=0, variables=_SYNC, overrides=(f"{RHYME}.streaming.enable=false",)),
    "stream, sync": Arm("stream", stale=0, variables=_SYNC),
    "stream, async": Arm("stream"),
    "stream, async, arrivals": Arm("stream", overrides=(f"{RHYME}.sorting.harvest=shortest",)),
    "full": Arm("full"),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def cells(settings: Iterable[str], repeats: int) -> Iterator[Cell]:
    """Runs in their order: by repeats, in each by settings, in each all arms."""
    return (Cell(setting, arm, seed) for seed in range(1, 1 + repeats) for setting in settings for arm in ARMS)


def train(cell: Cell, out: Path) -> None:
    """Make a run."""
    arm, clock, folder = ARMS[cell.arm], SETTINGS[cell.setting], cell.folder(out)
    settings = {
        "EPOCHS": str(min(arm.epochs, clock.epochs)),
        "PROMPTS": str(STEPS_AN_EPOCH * BATCH),
        "SEED": str(cell.seed),
    }
    overrides = [
        *tiny_run.sizes(BATCH, SAMPLES, SLOTS, arm.ranks),
        *(f"{ROLLOUT}.temperature={TEMPERATURE}", "trainer.save_freq=-1"),
        # or each part would be padded to a micro-batch of the whole
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={SAMPLES}",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu={SAMPLES}",
        *arm.overrides,
    ]
    train_ms = clock.train_ms and clock.train_ms / arm.ranks
    shutil.rmtree(folder, ignore_errors=True)  # of a run that did not come to its end
    tiny_run.train(folder, settings | arm.settings(), overrides, clock.step_ms, timeout=1200, train_ms=train_ms)


def measure(cell: Cell, folder: Path) -> dict[str, Any]:
    """Figures of a run, from the second epoch on, and what :func:`.real_run.faults` finds in all of it."""
    arm = ARMS[cell.arm]
    by_step = sorted(steps.from_metrics(folder / "metrics.jsonl").items())
    run = recorded.read(folder)
    slots, samples = arm.replicas * SLOTS, BATCH * SAMPLES
    whole = [row for _, row in by_step]
    counted = [row for step, row in by_step if step > STEPS_AN_EPOCH]

    def column(name: str, of: list[dict[str, Any]] = counted) -> np.ndarray:
        return np.array([row.get(name, np.nan) for row in of], dtype=float)

    seconds = column(metrics.STEP_S)
    tokens = column(metrics.RESPONSE_LENGTH_MEAN) * samples
    runs_on = arm.apart and arm.stale > 0
    measured = slot_time.measure(run.requests, run.stages, slots, runs_on=runs_on)
    assert measured is not None, "a run without requests has no metrics"
    windows = [window for window in measured.windows if window.step > STEPS_AN_EPOCH]
    span = sum(window.ended - window.began for window in windows)
    idle = np.sum([window.idle for window in windows], axis=0) / (slots * span)
    accepted, verified = (column(name).sum() for name in (metrics.SPEC_ACCEPTED, metrics.SPEC_VERIFY_STEPS))
    figures: dict[str, Any] = {
        "step_s": float(np.median(seconds)),
        "samples_per_s": samples * len(seconds) / seconds.sum(),
        "tokens_per_s": tokens.sum() / seconds.sum(),
        "bubble_ratio": float(idle.sum()),
        "acceptance_length": 1 + accepted / verified if verified > 0 else 1.0,
        "early_share": float(column(metrics.STREAM_EARLY).mean()),
        "parts": float(column(metrics.STREAM_PARTS).mean()),
        "wasted_tokens": float(np.nansum(column(metrics.SORTED_DISCARDED))),
        "pearson_least": float(column("training/rollout_actor_probs_pearson_corr", whole).min()),
    }
    shown = {name: short(value) for name, value in figures.items()}
    shown["idle"] = {why: short(share) for why, share in zip(slot_time.REASONS[1:], idle.tolist(), strict=True)}
    shown["steps_s"] = [short(value) for value in seconds]
    epochs = [whole[at : at + STEPS_AN_EPOCH] for at in range(0, len(whole), STEPS_AN_EPOCH)]
    rewards = [float(column(metrics.REWARD_MEAN, rows).mean()) for rows in epochs]
    ends = np.cumsum([column(metrics.STEP_S, rows).sum() for rows in epochs])
    shown["response_length"] = [short(column(metrics.RESPONSE_LENGTH_MEAN, rows).mean()) for rows in epochs]
    shown["reward"] = [short(value) for value in rewards]
    shown["seconds_to_reward"] = {
        str(wanted): next((short(end) for end, reward in zip(ends, rewards, strict=True) if reward >= wanted), None)
        for wanted in REWARDS
    }
    shown["staleness"] = staleness(run)
    return {"setting": cell.setting, "arm": cell.arm, "seed": cell.seed, **shown} | faults(
        run, dict(by_step), samples, LIMIT, arm.stale
    )


def staleness(run: recorded.Run) -> list[int]:
    """Of trained responses: how many have a token that is no version old, one version old, and so on."""
    request = run.requests
    rows = np.flatnonzero(request["trained"])
    samples = {}
    for row in rows.tolist():
        name = str(request["uid"][row]), int(request["sample"][row])
        late = int(request["step"][row]) - 1 - int(request["policy_version_start"][row])
        samples[name] = max(samples.get(name, 0), late)
    return np.bincount(list(samples.values())).tolist()


def medians(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each setting and arm: medians over its runs, and of some the least and greatest run."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["setting"], row["arm"]), []).append(row)
    for (setting, arm), runs in sorted(
        groups.items(), key=lambda of: ([*SETTINGS].index(of[0][0]), [*ARMS].index(of[0][1]))
    ):
        merged: dict[str, Any] = {"setting": setting, "arm": arm, "runs": len(runs)}
        for name in ("step_s", "samples_per_s", "tokens_per_s", "bubble_ratio", "early_share", "wasted_tokens"):
            values = np.array([np.nan if run[name] is None else run[name] for run in runs], dtype=float)
            merged[name] = short(np.median(values))
            if name in ("samples_per_s", "tokens_per_s", "bubble_ratio"):
                merged[f"{name}_range"] = [short(values.min()), short(values.max())]
        merged["idle"] = {why: short(np.median([run["idle"][why] for run in runs])) for why in runs[0]["idle"]}
        for name in ("response_length", "reward"):
            merged[name] = [short(value) for value in np.median([run[name] for run in runs], axis=0)]
        merged["staleness_max"] = max(len(run["staleness"]) for run in runs) - 1
        merged["seconds_to_reward"] = {
            str(wanted): [run["seconds_to_reward"][str(wanted)] for run in runs] for wanted in REWARDS
        }
        merged["faults"] = sum(len(run["faults"]) for run in runs)
        yield merged


def _told(row: dict[str, Any]) -> str:
    which = f"seed {row['seed']}" if "seed" in row else f"{row['runs']} runs"
    return (
        f"{row['setting']:7} {row['arm']:24} {which}: step {row['step_s']} s, {row['samples_per_s']} samples/s, "
        f"{row['tokens_per_s']} tokens/s, bubble {row['bubble_ratio']}, early {row['early_share']}, length "
        f"{row['response_length']}, reward {row['reward']}, faults {row['faults'] or 'none'}"
    )


@app.command()
def main(
    settings: Annotated[list[str] | None, typer.Argument(help="default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="two arms, one seed (six minutes)")] = False,
    arm: Annotated[list[str] | None, typer.Option(help="may be given again; default: all")] = None,
    runs: Annotated[int | None, typer.Option(help="to make at most; 0: only show what there is")] = None,
    repeats: Annotated[int, typer.Option(help="of each arm")] = 3,
    out: Annotated[Path, typer.Option(help="where the runs are kept")] = Path("runs/systems"),
    again: Annotated[bool, typer.Option(help="measure kept runs anew")] = False,
) -> None:
    """Train, measure, print."""
    chosen = settings or list(SETTINGS)
    for kind, given, known in (("setting", chosen, SETTINGS), ("arm", arm or (), ARMS)):
        if unknown := sorted(set(given) - set(known)):
            raise typer.BadParameter(f"no {kind} {'; '.join(unknown)}; there are: {'; '.join(known)}")
    wanted = [cell for cell in cells(chosen, repeats) if not arm or cell.arm in arm]
    if quick:
        wanted = [
            cell for cell in wanted if cell.seed == 1 and cell.arm in ("separate_async, drafts", "stream, async")
        ][:2]
    kept = Kept(out)
    about = {"benchmark": "systems", "machine": describe(), "commit": commit()}
    if again:
        kept.replace(
            [{**row, **measure(cell, cell.folder(out)), "measured_by": commit()} for cell, row in kept.by_cell()]
        )

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
