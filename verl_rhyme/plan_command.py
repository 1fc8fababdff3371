"""``verl-rhyme plan``: which GPUs generate and which train."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from verl_rhyme.scheduling.allocation.planner import Plan, Split
    from verl_rhyme.simulation.plan_file import LoadedPlan

#: Rows of the table.
_SHOWN = 8
#: Columns of a terminal that the table wants.
_WIDTH = 104
#: Of a step, by which turns on the same GPUs have to be faster to be recommended.
_BETTER = 0.99


def plan(
    cluster: Annotated[Path, typer.Argument(help="Sites, kinds and batch, such as examples/plan/one_site.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Over the file's.")] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(metavar="[KIND=]FILE", help="A replica's profile (verl-rhyme profile), in place of a kind's own."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Which GPUs generate and which train: the split, its step and cost, and the overrides for it."""
    from verl_rhyme.scheduling.allocation.planner import plan as best_plan
    from verl_rhyme.simulation import plan_file

    try:
        loaded = plan_file.load(cluster, overrides or [], profile or [])
        found = best_plan(loaded.problem, loaded.objective, loaded.slowest)
    except (OSError, ValueError) as error:
        print(f"verl-rhyme plan: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(_report(found, loaded), indent=2))
    else:
        _print(found, loaded)


def overrides_of(split: Split, staleness: int, drains: bool) -> list[str]:
    """What verl and ``+rhyme=stream`` are to be told of a split, as hydra overrides."""

    def nodes(of: str, shares: list[tuple[int, int]]) -> Iterator[str]:
        gpus, node = sum(share for share, _ in shares), shares[0][1]
        yield f"{of}.nnodes={-(-gpus // node)}"
        yield f"{of}.n_gpus_per_node={min(gpus, node)}"

    return [
        "+rhyme=stream",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=relay",
        *nodes("trainer", [(split.train_gpus, split.train.node)]),
        *nodes("actor_rollout_ref.rollout", [(gpus, pool.node) for pool, gpus in split.rollout]),
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={split.tp}",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={min(pool.utilization for pool, _ in split.rollout)}",
        f"actor_rollout_ref.rollout.max_num_seqs={min(pool.replicas[split.tp].slots for pool, _ in split.rollout)}",
        *(
            f"actor_rollout_ref.rollout.custom.rhyme.sorting.{name}"
            for name in (f"max_staleness={staleness}", f"keep_running={str(drains).lower()}")
        ),
    ]


def _report(found: Plan, loaded: LoadedPlan) -> dict[str, Any]:
    overlap = loaded.problem.overlap
    return {
        "objective": loaded.objective,
        "best": _row(found.best),
        "overrides": overrides_of(found.best, overlap.staleness, overlap.drains),
        "compared": [_row(split) for split in found.others],
        "looked_at": found.looked_at,
        "refused": found.refused,
        "sources": loaded.sources,
    }


def _row(split: Split) -> dict[str, Any]:
    return {
        "what": split.what,
        "train": {"pool": split.train.name, "gpus": split.train_gpus},
        "rollout": [{"pool": pool.name, "gpus": gpus} for pool, gpus in split.rollout],
        "tensor_parallel": split.tp,
        "step_s": split.step,
        "generation_s": split.generated,
        "training_s": split.trained,
        "transfer_s": split.transfer,
        "generation_idle": split.rollout_idle,
        "training_idle": split.train_idle,
        "gpus": split.gpus,
        "price_per_hour": split.hourly,
        "cost_per_sample": split.cost,
    }


def _print(found: Plan, loaded: LoadedPlan) -> None:
    best, overlap = found.best, loaded.problem.overlap
    least = "step time" if loaded.objective == "time" else "cost of a trained sample"
    print(f"best of {found.looked_at} splits by {least}:")
    print(f"  training    {best.train_gpus} GPUs of {best.train.name}")
    replicas = [f"{gpus} GPUs of {pool.name} ({gpus // best.tp} replicas of {best.tp})" for pool, gpus in best.rollout]
    print(f"  generation  {', '.join(replicas)}")
    table = Table(box=None, pad_edge=False)
    for column in ("training", "generation"):
        table.add_column(column, no_wrap=True)
    for column in ("TP", "step s", "gen.", "train", "idle", "GPUs", "cost"):
        table.add_column(column, justify="right", no_wrap=True)
    for split in [best, *found.others[: _SHOWN - 1]]:
        rollout = " + ".join(f"{gpus} {pool.name}" for pool, gpus in split.rollout)
        table.add_row(
            escape(f"{split.train_gpus} {split.train.name}"),
            "the same, in turns" if split.colocated else escape(rollout),
            str(split.tp),
            *(f"{seconds:.0f}" for seconds in (split.step, split.generated, split.trained)),
            f"{split.rollout_idle:.0%} {split.train_idle:.0%}",
            str(split.gpus),
            "" if split.cost is None else f"{1000 * split.cost:.2f}",
        )
    Console(width=max(_WIDTH, Console().width)).print(table, highlight=False)
    if hidden := found.others[_SHOWN - 1 :]:
        print(f"and {len(hidden)} more (--json has all)")
    print(
        "gen., train: seconds of each without the other; idle: shares of a step in which generation and training wait"
    )
    print(
        "cost: of 1000 trained samples, in the currency of the prices"
        if best.cost is not None
        else "no prices: no cost"
    )
    if best.transfer:
        print(f"a version is {best.transfer:.0f} s on its way between the sites")
    turns = next((split for split in found.others if split.colocated), None)
    if turns is not None and turns.step < _BETTER * best.step and loaded.objective == "time":
        print(f"in turns on the same {turns.gpus} GPUs a step takes {turns.step:.0f} s: +rhyme=histopipe, or =sorted")
    for why in found.refused:
        print(f"not possible: {why}")
    for what, source in loaded.sources.items():
        print(f"what steps cost on {what}: {source}")
    print("overrides:")
    for line in overrides_of(best, overlap.staleness, overlap.drains):
        print(f"  {line}")
