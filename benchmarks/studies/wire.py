"""Messages and bytes of a real training: through TransferQueue, Ray's actors and the trainer's process.

    python -m benchmarks.studies.wire [--json] [--quick] [--checkout DIR] [--out DIR] [ARM ...]

Trains the tiny world with verl, vLLM, Ray and TransferQueue, and counts in every process what it sends and receives
(:mod:`benchmarks.studies.wire_counts`), by role and per trained sample. What is said at the start and at the end of the
run is in it. Responses have about a hundred tokens here: bytes that grow with them say less than how often somebody is
asked. ``--checkout`` measures another checkout of the project the same way.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.machine import describe
from verl_rhyme.observability import steps

ROOT = Path(__file__).parents[2]
WIRE_COUNTS = Path(__file__).parent / "wire_counts"
PROMPTS, BATCH, SAMPLES = 64, 8, 8
ARMS: dict[str, dict[str, str]] = {
    "sync + drafts": {"RHYME": "histospec"},
    "full on-policy + drafts": {"RHYME": "full", "STALENESS": "0"},
    "full + drafts": {"RHYME": "full"},
}
#: By how a process's title begins.
ROLES = {
    "ray::TaskRunner": "trainer",
    "python -m verl": "main process",
    "ray::Coordinator": "coordinator",
    "ray::SessionAgentLoopWorker": "agent loop workers",
    "ray::RhymeAgentLoopWorker": "agent loop workers",
    "ray::SimpleStorageUnit": "TransferQueue",
    "ray::TransferQueueController": "TransferQueue",
    "ray::History": "history writers",
    "ray::GlobalRequestLoadBalancer": "router",
    "ray::RhymeHttpServer": "replicas",
    "VLLM::": "replicas",
    "ray::WorkerDict": "actor",
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)


def train(arm: str, folder: Path, checkout: Path, epochs: int) -> None:
    """One run; the counts of its processes go to ``folder``/counts."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "counts").mkdir(parents=True)
    env = {
        **os.environ,
        **ARMS[arm],
        "WIRE_COUNTS": str(folder / "counts"),
        "PYTHONPATH": os.pathsep.join([str(WIRE_COUNTS), str(checkout)]),
        "RUN_DIR": str(folder / "run"),
        "EPOCHS": str(epochs),
        "PROMPTS": str(PROMPTS),
        "SEED": "1",
    }
    command = [
        *("bash", str(checkout / "recipes" / "run_tiny_cpu.sh")),
        *(f"data.train_batch_size={BATCH}", f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}"),
        *("actor_rollout_ref.rollout.max_num_seqs=16", f"actor_rollout_ref.rollout.n={SAMPLES}"),
    ]
    with (folder / "log").open("w") as log:
        subprocess.run(command, env=env, stdout=log, stderr=log, check=True, timeout=1200)


def by_role(folder: Path) -> dict[str, Counter[str]]:
    """Counts of a run's processes, summed for each of the :data:`ROLES`."""
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted((folder / "counts").glob("*.json")):
        counts = json.loads(path.read_text())
        title = counts.pop("title")
        found[next((role for start, role in ROLES.items() if title.startswith(start)), title[:40])] += counts
    return dict(found)


@app.command()
def main(
    arms: Annotated[list[str] | None, typer.Argument(help="default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one object a line")] = False,
    quick: Annotated[bool, typer.Option(help="one epoch of the first arm (two minutes)")] = False,
    checkout: Annotated[Path, typer.Option(help="the project's checkout to measure")] = ROOT,
    out: Annotated[Path, typer.Option(help="where the runs are kept")] = Path("runs/wire"),
) -> None:
    """Train, count, print."""
    chosen = arms or list(ARMS)[: 1 if quick else None]
    if unknown := sorted(set(chosen) - set(ARMS)):
        raise typer.BadParameter(f"no arm {', '.join(unknown)}; there are: {', '.join(ARMS)}")
    version = subprocess.run(
        ["git", "-C", str(checkout), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    for arm in chosen:
        folder = out.absolute() / arm.replace(" ", "_")
        train(arm, folder, checkout.absolute(), 1 if quick else 2)
        trained = len(steps.from_metrics(folder / "run" / "metrics.jsonl")) * BATCH * SAMPLES
        for role, counts in sorted(by_role(folder).items()):
            figures = {name: round(count / trained, 2) for name, count in sorted(counts.items())}
            row = {"benchmark": "wire", "arm": arm, "role": role, "trained": trained, **figures}
            row |= {"machine": describe(), "commit": version or "unknown"}
            print(json.dumps(row) if as_json else f"{arm:28} {role:20} {figures}", flush=True)


if __name__ == "__main__":
    app()
