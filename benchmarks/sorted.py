"""Trainer modes side by side: real verl, vLLM and GRPO on the tiny world, one replica with fewer slots than samples.

    python -m benchmarks.sorted [--json] [--quick] [--steady-ms MS] [--out DIR] [ARM ...]

Every arm trains the same prompts with the same update batch. Arms take turns: each trains its first half, then each
resumes from its checkpoint and trains the second. The first group after each start is warm-up and is not counted; of
each other there is a row. At the end there is one of each arm's time to a reward.

With ``--steady-ms`` a decoding step takes at least so long, whatever is in it (:mod:`benchmarks.steady_step`), as on a
GPU. Then most of a rollout is sleep, which other work on the machine does not disturb, and each arm trains in one go.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import tiny_run
from benchmarks.machine import commit, describe
from verl_rhyme.observability import metrics, steps

PROMPTS, BATCH, SAMPLES, SLOTS, GROUP = 64, 8, 8, 16, 4
STEPS_AN_EPOCH = PROMPTS // BATCH
#: Mean reward over an epoch's updates, in which each prompt is trained once.
REWARDS = (0.36, 0.38)
_NO_DRAFTS = f"{tiny_run.RHYME}.drafting.enable=false"

#: Environment and overrides of each arm.
ARMS: dict[str, tuple[dict[str, str], list[str]]] = {
    "sync": ({"RHYME": "off"}, []),
    "colocate_async": ({"RHYME": "off", "MODE": "colocate_async"}, []),
    "sync + drafts": ({"RHYME": "histospec"}, []),
    "sorted on-policy": ({"RHYME": "sorted"}, [_NO_DRAFTS]),
    "sorted on-policy + drafts": ({"RHYME": "sorted"}, []),
    "sorted on-policy + coupling": ({"RHYME": "sorted", "SORTED_COUPLED": "1"}, []),
    "sorted partial + drafts": ({"RHYME": "sorted", "SORTED_MODE": "partial"}, []),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def train(arm: str, folder: Path, epochs: int, steady_ms: float | None) -> None:
    """Train an arm up to ``epochs``, from its latest checkpoint where there is one."""
    env, overrides = ARMS[arm]
    sized = [
        *(f"data.train_batch_size={BATCH}", f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}"),
        *(f"actor_rollout_ref.rollout.max_num_seqs={SLOTS}", f"trainer.save_freq={epochs * STEPS_AN_EPOCH}"),
    ]
    settings = {"EPOCHS": str(epochs), "PROMPTS": str(PROMPTS), "SEED": "1", **env}
    tiny_run.train(folder, settings, [*sized, *overrides], steady_ms)


def measure(arm: str, folder: Path, first: int, last: int) -> dict[str, Any]:
    """Figures of the steps ``first`` to ``last``."""
    rows = [row for step, row in sorted(steps.from_metrics(folder / "metrics.jsonl").items()) if first <= step <= last]

    def column(name: str) -> np.ndarray:
        return np.array([row.get(name, np.nan) for row in rows], dtype=float)

    tokens = column(metrics.RESPONSE_LENGTH_MEAN) * BATCH * SAMPLES
    rollout, step = column(metrics.GEN_S), column(metrics.STEP_S)
    bubble = column(metrics.BUBBLE_RATIO)
    total = tokens.sum()
    figures = {
        "steps": len(rows),
        "tokens": total,
        "rollout_s": rollout.sum(),
        "step_s": step.sum(),
        "tokens_per_rollout_s": total / rollout.sum(),
        "tokens_per_step_s": total / step.sum(),
        "bubble_ratio": np.average(bubble, weights=rollout),
        "reward": column(metrics.REWARD_MEAN).mean(),
        "response_length": total / (len(rows) * BATCH * SAMPLES),
        "grad_norm": column("actor/grad_norm").mean(),
        "staleness_max": column(metrics.STALENESS_MAX).max(),
        "staleness_worst_max": column("training/off_policy/trajectory_staleness_worst/max").max(),
        "discarded_tokens": column(metrics.SORTED_DISCARDED).sum(),
        "reverified_tokens": column(metrics.SPEC_REVERIFIED).sum(),
        "waiting_max": column(metrics.SORTED_WAITING_MAX).max(),
    }
    shown = {name: None if np.isnan(value) else round(float(value), 4) for name, value in figures.items()}
    return {"benchmark": "sorted", "arm": arm, "first_step": first, "last_step": last, **shown}


def seconds_to_reward(folder: Path, starts: list[int], reward: float) -> float | None:
    """Seconds of training until the updates of an epoch's length had this mean reward; ``None``: it was not reached.

    The first update after each of the ``starts``, in which everything is warmed up, counts like a median one.
    """
    rows = [row for _, row in sorted(steps.from_metrics(folder / "metrics.jsonl").items())]
    seconds = np.array([row[metrics.STEP_S] for row in rows])
    seconds[starts] = np.median(np.delete(seconds, starts))
    rewards = np.array([row[metrics.REWARD_MEAN] for row in rows])
    reached = np.convolve(rewards, np.ones(STEPS_AN_EPOCH) / STEPS_AN_EPOCH, "valid") >= reward
    return round(float(seconds.cumsum()[STEPS_AN_EPOCH - 1 :][reached.argmax()]), 1) if reached.any() else None


@app.command()
def main(
    arms: Annotated[list[str] | None, typer.Argument(help="default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="one epoch of two arms (five minutes: each starts verl)")] = False,
    steady_ms: Annotated[float | None, typer.Option(help="milliseconds that a decoding step takes at least")] = None,
    out: Annotated[Path, typer.Option(help="where the runs are kept")] = Path("runs/sorted"),
) -> None:
    """Train, measure, print."""
    chosen = arms or (["sync", "sorted on-policy + coupling"] if quick else list(ARMS))
    if unknown := sorted(set(chosen) - set(ARMS)):
        raise typer.BadParameter(f"no arm {', '.join(unknown)}; there are: {', '.join(ARMS)}")
    setting = {"prompts": PROMPTS, "update_prompts": BATCH, "samples": SAMPLES, "slots": SLOTS, "group_batches": GROUP}
    setting |= {"steady_ms": steady_ms, "machine": describe(), "commit": commit()}
    stops = [1] if quick else [2] if steady_ms is not None else [1, 2]  # epochs
    done = 0
    for epochs in stops:
        for arm in chosen:
            folder = _folder(out, arm)
            train(arm, folder, epochs, steady_ms)
            for first in range(done + GROUP + 1, epochs * STEPS_AN_EPOCH + 1, GROUP):
                row = measure(arm, folder, first, first + GROUP - 1)
                print(json.dumps({**row, **setting}) if as_json else f"{arm:30} {row}", flush=True)
        done = epochs * STEPS_AN_EPOCH
    starts = [0, *(epochs * STEPS_AN_EPOCH for epochs in stops[:-1])]
    for arm in chosen:
        for reward in REWARDS:
            seconds = seconds_to_reward(_folder(out, arm), starts, reward)
            row = {"benchmark": "sorted", "arm": arm, "mean_reward": reward, "reached_after_s": seconds}
            print(json.dumps({**row, **setting}) if as_json else f"{arm:30} {row}", flush=True)


def _folder(out: Path, arm: str) -> Path:
    folder = out.absolute() / arm.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    app()
