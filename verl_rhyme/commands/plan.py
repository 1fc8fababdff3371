"""``verl-rhyme plan``: division of GPUs between rollout and training, and the profitable bound on staleness."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_rhyme.commands.output import one_line_errors
from verl_rhyme.commands.shapes import What, of_arguments

if TYPE_CHECKING:
    from verl_rhyme.planning.cost import ReplicaCost
    from verl_rhyme.planning.plan_file import LoadedPlan
    from verl_rhyme.planning.planner import Plan, Split

#: Minimum width of the table in characters.
_WIDTH = 128
COMPARE_REWARDS = (
    "compare rewards at equal samples before you let tokens be more than 1 version stale (docs/choosing.md)"
)
#: Most step time of colocated training, as a share of that on separate GPUs, to be recommended.
_BETTER = 0.99


def plan(
    arguments: What,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Divide GPUs between rollout and training and find the profitable max_staleness: steps, costs, overrides.

    A file is like examples/plan/one_site.yaml; a shape is one site with one kind of GPU, and drafts.
    """
    from verl_rhyme.planning import plan_file, planner
    from verl_rhyme.planning.shape import SOURCE

    with one_line_errors("verl-rhyme plan"):
        if (shape := of_arguments(arguments)) is None:
            loaded = plan_file.load(Path(arguments[0]), arguments[1:])
        else:
            loaded = plan_file.of_tree(shape.plan_file(None, shape.acceptance[-1]), SOURCE)
        try:
            plans = planner.plan_bounds(loaded.problem) if loaded.compare_bounds else [planner.plan(loaded.problem)]
        except planner.NoSplit as error:
            if shape is None:
                raise
            raise ValueError(
                f"{error}\n`verl-rhyme simulate` with the same sizes compares colocated engines"
            ) from error
        best = planner.profitable(plans)
    if as_json:
        print(json.dumps(_report(plans, best, loaded), indent=2))
    else:
        _print(plans, best, loaded)


def colocated(
    preset: str, max_staleness: int | None, gpus: int, node: int, replica: ReplicaCost, utilization: float
) -> list[str]:
    """Return the overrides of a run whose engines and training share ``gpus``, ``node`` of them in a node."""
    return [
        f"+rhyme={preset}",
        f"trainer.v1.trainer_mode={'colocate_async' if max_staleness else 'sync'}",
        f"trainer.nnodes={-(-gpus // node)}",
        f"trainer.n_gpus_per_node={min(gpus, node)}",
        *_engines(replica, utilization),
        *_bound(max_staleness),
    ]


def _engines(replica: ReplicaCost, utilization: float) -> list[str]:
    return [
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={replica.gpus}",
        f"actor_rollout_ref.rollout.gpu_memory_utilization={utilization}",
        f"actor_rollout_ref.rollout.max_num_seqs={replica.slots}",
    ]


def _bound(max_staleness: int | None) -> list[str]:
    """Return the option; ``None``: verl's schedule, which has none."""
    name = "actor_rollout_ref.rollout.custom.rhyme.max_staleness"
    return [] if max_staleness is None else [f"{name}={max_staleness}"]


def overrides_of(split: Split, max_staleness: int | None, preset: str = "full") -> list[str]:
    if split.colocated:
        pool = split.rollout
        return colocated(preset, max_staleness, split.train_gpus, pool.node, pool.replicas[split.tp], pool.utilization)
    train, rollout = (
        (-(-gpus // pool.node), min(gpus, pool.node))  # nodes, and GPUs of each
        for gpus, pool in ((split.train_gpus, split.train), (split.rollout_gpus, split.rollout))
    )
    return [
        f"+rhyme={preset}",
        "trainer.v1.trainer_mode=separate_async",
        f"trainer.nnodes={train[0]}",
        f"trainer.n_gpus_per_node={train[1]}",
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=relay",
        f"actor_rollout_ref.rollout.nnodes={rollout[0]}",
        f"actor_rollout_ref.rollout.n_gpus_per_node={rollout[1]}",
        *_engines(split.rollout.replicas[split.tp], split.rollout.utilization),
        *_bound(max_staleness),
    ]


def _advised(chosen: Plan, objective: str) -> Split:
    """Return the split whose overrides are printed: colocated training, if its step is shorter."""
    turns = chosen.turns
    better = turns is not None and objective == "time" and turns.step < _BETTER * chosen.best.step
    return turns if better and turns is not None else chosen.best


def _report(plans: Sequence[Plan], chosen: Plan, loaded: LoadedPlan) -> dict[str, Any]:
    return {
        "objective": loaded.problem.objective,
        "max_staleness": chosen.max_staleness,
        "why": _reason(plans, chosen),
        "dial": [
            {
                "max_staleness": plan.max_staleness,
                "staleness_mean": _mean_staleness(plan.max_staleness),
                "colocated_step_s": None if plan.turns is None else plan.turns.step,
                **_row(plan.best),
            }
            for plan in plans
        ],
        "best": _row(chosen.best),
        "overrides": overrides_of(_advised(chosen, loaded.problem.objective), chosen.max_staleness),
        "compared": [_row(split) for split in chosen.others],
        "looked_at": chosen.compared,
        "refused": chosen.refused,
        "sources": loaded.sources,
    }


def _row(split: Split) -> dict[str, Any]:
    return {
        "what": split.arrangement,
        "train": {"pool": split.train.name, "gpus": split.train_gpus},
        "rollout": {"pool": split.rollout.name, "gpus": split.rollout_gpus},
        "tensor_parallel": split.tp,
        "binds": split.binds,
        "step_s": split.step,
        "tokens_per_s": split.tokens_per_s,
        "rollout_s": split.rolled_out,
        "trainer_s": split.trained,
        "transfer_s": split.transfer,
        "trainer_idle": split.train_idle,
        "gpus": split.gpus,
        "price_per_hour": split.hourly,
        "cost_per_sample": split.cost,
    }


def _mean_staleness(bound: int) -> float:
    """Return the mean staleness of trained groups with the batches in flight of ``full`` (Little's law)."""
    from verl_rhyme.scheduling.rules import Rules

    return Rules(1, 1, max_staleness=bound).batches - 1


def _reason(plans: Sequence[Plan], chosen: Plan) -> str:
    from verl_rhyme.planning.planner import PROFIT

    if len(plans) == 1:
        return f"max_staleness={chosen.max_staleness}, as given"
    measure = "tokens/s" if chosen.best.problem.objective == "time" else "samples for the price"
    first, best = plans[0], min(plans, key=lambda plan: plan.best.value)
    before, after = (
        min((plan.best, *filter(None, [plan.turns])), key=lambda split: split.value) for plan in (first, chosen)
    )
    gain, most = before.value / after.value, chosen.best.value / best.best.value - 1
    reason = f"max_staleness={chosen.max_staleness} is profitable: "
    if chosen is not first:
        where = ", colocated" if before.colocated else ""
        reason += f"{gain:.2f} times the {measure} of max_staleness={first.max_staleness}{where}; "
    if most < 0.01:
        return reason + f"larger bounds gain nothing, because the step is limited by: {chosen.best.binds}"
    return reason + f"larger bounds gain at most {most:.0%} (below {PROFIT:.0%}, at max_staleness={best.max_staleness})"


def _print(plans: Sequence[Plan], chosen: Plan, loaded: LoadedPlan) -> None:
    best, by_time = chosen.best, loaded.problem.objective == "time"
    advised, priced = _advised(chosen, loaded.problem.objective), best.cost is not None
    columns = ("trainer", "TP", "limit", "step s", "tokens/s", "trainer idle", "mean staleness", "colocated")
    table = Table("max_staleness", "rollout", *columns, *["cost"] * priced, box=None, pad_edge=False)
    for plan in plans:
        split = plan.best
        table.add_row(
            str(plan.max_staleness),
            escape(f"{split.rollout_gpus} {split.rollout.name}"),
            escape(f"{split.train_gpus} {split.train.name}"),
            str(split.tp),
            split.binds,
            f"{split.step:.0f}",
            f"{split.tokens_per_s:.0f}",
            f"{split.train_idle:.0%}",
            f"{_mean_staleness(plan.max_staleness):g}",
            "" if plan.turns is None else f"{plan.turns.step:.0f}",
            *([f"{1000 * (split.cost or 0):.2f}"] * priced),
        )
    Console(width=max(_WIDTH, Console().width)).print(table, highlight=False)
    cost = "; cost: of 1000 trained samples, in the currency of the prices" * priced
    print(f"rollout, trainer: GPUs; TP: GPUs of a replica{cost}")
    print("colocated: step s if rollout and training take turns on the same GPUs")
    print(f"\n{_reason(plans, chosen)}")
    print(f"best of {chosen.compared} splits by {'step time' if by_time else 'cost of a trained sample'}")
    if best.transfer:
        print(f"the transfer of a policy version between the sites takes {best.transfer:.0f} s")
    if advised.colocated:
        print(f"colocated on {advised.gpus} GPUs, a step takes {advised.step:.0f} s: less than on separate ones")
    if chosen.max_staleness > 1:
        print(COMPARE_REWARDS)
    for reason in chosen.refused:
        print(f"not possible: {reason}")
    for kind, source in loaded.sources.items():
        print(f"source of step costs on {kind}: {source}")
    print("overrides:", *overrides_of(advised, chosen.max_staleness), sep="\n  ")
