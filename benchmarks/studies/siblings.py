"""What it is worth to keep a prompt's samples on one replica: first-epoch acceptance over several real replicas.

    python -m benchmarks.studies.siblings [--json] [--quick] [--replicas N ...] [--seeds N ...] [--runs N] [--out DIR]

Real verl, vLLM and GRPO on the tiny world with +rhyme=histospec, trained for one epoch, in which no prompt has a
history: drafts come from the other samples of its group, from the request itself and from other prompts, all as far as
they are on the same replica. Arms, interleaved by seed: `least_loaded` (verl's router) and `sticky_group`. Each run is
a few minutes long, and its row is kept in ``--out``: started again, what is there is not run again, so that
``--runs 1`` goes on by one run.

"siblings_met" is the share of samples that were at their replica beside a sibling, or after one
(:mod:`benchmarks.meetings`); "siblings" how many of the other seven a sample met there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import tiny_run
from benchmarks.machine import commit, describe
from benchmarks.meetings import meetings
from benchmarks.real_run import Cell, Kept, short
from benchmarks.tiny_run import RHYME, ROLLOUT
from verl_rhyme.observability import metrics, steps
from verl_rhyme.simulation import recorded

PROMPTS, BATCH, SAMPLES = 64, 16, 8
BLOCKS = 512  # of 128 tokens: all that may run at once. vLLM would take 1 GiB in each replica
POLICY = f"{RHYME}.placement.policy"
ARMS = {"least_loaded": "null", "sticky_group": "sticky_group"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def cells(replicas: list[int], seeds: list[int]) -> list[Cell]:
    """Runs in their order: arms take turns, and begin in turn."""
    return [
        Cell(f"{number} replicas", arm, seed)
        for number in replicas
        for turn, seed in enumerate(seeds)
        for arm in list(ARMS)[:: -1 if turn % 2 else 1]
    ]


def train(cell: Cell, folder: Path) -> None:
    """One epoch; a run that did not come to its end goes on."""
    replicas = int(cell.setting.split()[0])
    settings = {"RHYME": "histospec", "EPOCHS": "1", "PROMPTS": str(PROMPTS), "SEED": str(cell.seed)}
    overrides = [
        *(f"{POLICY}={ARMS[cell.arm]}", f"trainer.n_gpus_per_node={replicas}", f"data.train_batch_size={BATCH}"),
        *(f"{ROLLOUT}.n={SAMPLES}", f"+{ROLLOUT}.engine_kwargs.vllm.num_gpu_blocks_override={BLOCKS}"),
    ]
    tiny_run.train(folder, settings, overrides)


def measure(folder: Path) -> dict[str, Any]:
    """Acceptance over the epoch, and who met siblings."""
    rows = list(steps.from_metrics(folder / "metrics.jsonl").values())
    drafted, accepted, verified = (
        float(np.sum([row[name] for row in rows]))
        for name in (metrics.SPEC_DRAFTED, metrics.SPEC_ACCEPTED, metrics.SPEC_VERIFY_STEPS)
    )
    request = recorded.read(folder).requests
    trained = request["trained"]
    groups = [*zip(request["step"][trained].tolist(), request["prompt_key"][trained].tolist(), strict=True)]
    where = request["replica"][trained]
    found = meetings(groups, where.tolist(), request["started_at"][trained], request["finished_at"][trained])
    tokens = np.array([request["response_tokens"][trained][where == each].sum() for each in np.unique(where)])
    return {
        "steps": len(rows),
        "acceptance_length": round(1 + accepted / verified, 3),
        "accepted_share": round(accepted / drafted, 3),
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "rollout_s": short(float(np.sum([row[metrics.GEN_S] for row in rows]))),
        "siblings_met": short(found.met),
        "siblings": short(found.siblings),
        "tokens_to_mean": short(float(tokens.max() / tokens.mean())),
    }


@app.command()
def main(
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="two replicas, one seed (five minutes: each arm starts verl)")] = False,
    replicas: Annotated[list[int] | None, typer.Option(help="default: 2 and 4")] = None,
    seeds: Annotated[list[int] | None, typer.Option(help="default: 1, 2, 3")] = None,
    runs: Annotated[int | None, typer.Option(help="to make at most; 0: only show what there is")] = None,
    out: Annotated[Path, typer.Option(help="where the runs are kept")] = Path("runs/siblings"),
) -> None:
    """Train, measure, print."""
    about = {"benchmark": "siblings", "prompts": PROMPTS, "samples": SAMPLES, "machine": describe(), "commit": commit()}

    def make(cell: Cell) -> dict[str, Any]:
        folder = cell.folder(out)
        train(cell, folder)
        row = {"setting": cell.setting, "arm": cell.arm, "replicas": int(cell.setting.split()[0]), "seed": cell.seed}
        return {**about, **row, **measure(folder)}

    wanted = cells(replicas or ([2] if quick else [2, 4]), seeds or ([1] if quick else [1, 2, 3]))
    for row in Kept(out).complete(wanted, runs, make, lambda row: as_json or print(row, flush=True)) or ():
        if as_json and Cell(row["setting"], row["arm"], row["seed"]) in wanted:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    app()
