"""What it is worth to keep a prompt's samples on one replica: first-epoch acceptance over several real replicas.

    python -m benchmarks.siblings [--json] [--quick] [--replicas N ...] [--seeds N ...] [--out DIR]

Real verl, vLLM and GRPO on the tiny world with +rhyme=histospec, trained for one epoch, in which no prompt has a
history: drafts come from the other samples of its group, from the request itself and from other prompts, all as far as
they are on the same replica. Arms, interleaved by seed: `least_loaded` (verl's router) and `sticky_group`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import tiny_run
from benchmarks.machine import commit, describe
from benchmarks.tiny_run import RHYME, ROLLOUT
from verl_rhyme.observability import metrics, steps

PROMPTS, BATCH, SAMPLES = 64, 16, 8
BLOCKS = 512  # of 128 tokens: all that may run at once. vLLM would take 1 GiB in each replica
POLICY = f"{RHYME}.placement.policy"
ARMS = {"least_loaded": "null", "sticky_group": "sticky_group"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def train(arm: str, replicas: int, seed: int, folder: Path) -> None:
    """One epoch."""
    settings = {"RHYME": "histospec", "EPOCHS": "1", "PROMPTS": str(PROMPTS), "SEED": str(seed)}
    overrides = [
        *(f"{POLICY}={ARMS[arm]}", f"trainer.n_gpus_per_node={replicas}", f"data.train_batch_size={BATCH}"),
        *(f"{ROLLOUT}.n={SAMPLES}", f"+{ROLLOUT}.engine_kwargs.vllm.num_gpu_blocks_override={BLOCKS}"),
    ]
    tiny_run.train(folder, settings, overrides)


def measure(folder: Path) -> dict[str, float]:
    """Acceptance over the epoch."""
    rows = list(steps.from_metrics(folder / "metrics.jsonl").values())
    drafted, accepted, verified = (
        float(np.sum([row[name] for row in rows]))
        for name in (metrics.SPEC_DRAFTED, metrics.SPEC_ACCEPTED, metrics.SPEC_VERIFY_STEPS)
    )
    return {
        "steps": len(rows),
        "acceptance_length": round(1 + accepted / verified, 3),
        "accepted_share": round(accepted / drafted, 3),
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
    }


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="two replicas, one seed (five minutes: each arm starts verl)")] = False,
    replicas: Annotated[list[int] | None, typer.Option(help="default: 2 and 4")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="default: 1, 2, 3")] = None,
    out: Annotated[Path, typer.Option(help="where the runs are kept")] = Path("runs/siblings"),
) -> None:
    """Train, measure, print."""
    about = {"benchmark": "siblings", "prompts": PROMPTS, "samples": SAMPLES, "machine": describe(), "commit": commit()}
    for number in replicas or ([2] if quick else [2, 4]):
        for turn, seed in enumerate(seeds or ([1] if quick else [1, 2, 3])):
            for arm in list(ARMS)[:: -1 if turn % 2 else 1]:
                folder = out.absolute() / f"{arm}-{number}-{seed}"
                train(arm, number, seed, folder)
                row: dict[str, Any] = {"arm": arm, "replicas": number, "seed": seed, **measure(folder)}
                print(json.dumps({**about, **row}) if as_json else row, flush=True)


if __name__ == "__main__":
    app()
