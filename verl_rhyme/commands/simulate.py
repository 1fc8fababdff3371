"""``verl-rhyme simulate``: a run in virtual time."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from verl_rhyme.commands.output import one_line_errors
from verl_rhyme.commands.plan import COMPARE_REWARDS, colocated, overrides_of
from verl_rhyme.commands.shapes import What, of_arguments

if TYPE_CHECKING:
    from verl_rhyme.planning.shape import Shape
    from verl_rhyme.simulation.cluster_file import Loaded
    from verl_rhyme.simulation.comparison import Refused, Row
    from verl_rhyme.simulation.run import Simulation


#: Minimum width of the table in characters.
_WIDTH = 100


def simulate(
    arguments: What,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per step or preset.")] = False,
) -> None:
    """Simulate a run in virtual time, with the scheduler, placement and length predictor of training.

    Of a file such as examples/simulate/dapo32b.yaml each step; of a shape the presets compared.
    """
    from rich.progress import Progress

    from verl_rhyme.simulation import cluster_file
    from verl_rhyme.simulation.run import Simulation

    with one_line_errors("verl-rhyme simulate", RuntimeError):
        if (shape := of_arguments(arguments)) is not None:
            return _compare(shape, as_json)
        loaded = cluster_file.load(Path(arguments[0]), arguments[1:])
        rules, drafts = loaded.scenario.rules, max(loaded.scenario.drafts.acceptance) > 1
        size = f"{loaded.total} prompts, {loaded.updates} training steps of {rules.batch_prompts}"
        without = "" if drafts else "; without drafts (drafts.acceptance)"
        print(f"verl-rhyme simulate: {size}; rules in force: {rules.summary}{without}", file=sys.stderr)
        simulation = Simulation(loaded.scenario, loaded.prompts, loaded.updates)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("training steps", total=loaded.updates)
            simulation.run(lambda step: progress.update(task, completed=step.version + 1))
    _print_simulated(simulation, loaded, as_json)


def _print_simulated(simulation: Simulation, loaded: Loaded, as_json: bool) -> None:
    from verl_rhyme.simulation import summary

    steps = simulation.steps
    if as_json:
        for step in steps:
            print(json.dumps(summary.row(step)))
        inputs = {"sources": loaded.sources, "prompts": loaded.total}
        print(json.dumps({**summary.totals(simulation), **inputs}))
        return
    table = Table("step", *summary.COLUMNS, box=None, pad_edge=False)
    for step in steps:
        table.add_row(str(step.version + 1), *summary.cells(step))
    Console().print(table)
    for line in summary.lines(simulation):
        print(line)
    for source in loaded.sources:
        print(f"source of step costs: {source}")


def _compare(shape: Shape, as_json: bool) -> None:
    from rich.progress import track

    from verl_rhyme.simulation import comparison

    print(_described(shape), file=sys.stderr)
    processes = max(1, min(len(comparison.ROWS), len(os.sched_getaffinity(0))))
    print(f"simulating {len(comparison.ROWS)} runs in {processes} processes: half a minute to two", file=sys.stderr)
    found = comparison.compare(shape, processes)
    rows = list(track(found, "presets", len(comparison.ROWS), console=Console(stderr=True), transient=True))
    best = comparison.chosen(rows)
    if as_json:
        for row in rows:
            print(json.dumps({**_named(row), "chosen": row is best}))
        return
    stock = next(row.tokens_per_s for row in rows if isinstance(row, comparison.Row))
    columns = ("k", "engines", "step s, epoch 1", "step s, later", "tokens/s", "rollout", "staleness")
    table = Table("preset", *columns, box=None, pad_edge=False)
    for row in rows:
        where = "colocated" if not row.separate else "separate"
        start = row.preset, "" if row.max_staleness is None else str(row.max_staleness)
        if isinstance(row, comparison.Refused):
            table.add_row(*start, where, "not possible")
            continue
        if row.split is not None:
            where = f"{row.split.rollout_gpus} + {row.split.train_gpus} GPUs"
        times = f"{row.step_first_s:.0f}", f"{row.step_s:.0f}", f"{row.tokens_per_s / stock:.2f} x"
        table.add_row(*start, where, *times, f"{row.rollout:.0%}", f"{row.staleness_mean:.1f} ({row.staleness_max})")
    Console(width=max(_WIDTH, Console().width)).print(table, highlight=False)
    print(
        "k: max_staleness; engines: rollout + training; tokens/s: trained, of later epochs, over colocated stock verl"
    )
    print("rollout: share of a step in which training waits for it; staleness: mean (maximum), in versions")
    for reason in dict.fromkeys(row.reason for row in rows if isinstance(row, comparison.Refused)):
        print(f"not possible: {reason}")
    print(
        "calculated from data sheets, with the measured host time of steps with drafts; not counted: vLLM's V2 model "
        "runner, which presets turn off (docs/choosing.md)"
    )
    if best is None:
        print(f"\nno preset gains {comparison.WORTH - 1:.0%} over stock verl at its best: keep it")
        return
    print("\nnear the best speed, with the lowest staleness:", *_advised(best, shape), sep="\n  ")
    if best.staleness_max > 1:
        print(COMPARE_REWARDS)


def _described(shape: Shape) -> str:
    first, later = shape.acceptance
    return (
        f"verl-rhyme simulate: {shape.model} on {shape.gpus} {shape.gpu}, replicas of {shape.replica_gpus}; "
        f"{shape.batch} prompts x {shape.samples}; responses of {shape.mean_tokens:.0f} tokens on average, at most "
        f"{shape.response}{'' if shape.mean else ' (mean assumed: set mean)'}; {first:g}, then {later:g} tokens per "
        f"decoding step with drafts, at entropy={shape.entropy:g} nats"
    )


def _advised(row: Row, shape: Shape) -> list[str]:
    from verl_rhyme.planning import roofline

    if row.split is not None:
        return overrides_of(row.split, row.max_staleness, row.preset)
    replica = roofline.replica(shape.architecture, roofline.GPUS[shape.gpu], shape.replica_gpus)
    return colocated(row.preset, row.max_staleness, shape.gpus, shape.node, replica, roofline.UTILIZATION)


def _named(row: Row | Refused) -> dict[str, Any]:
    flat = vars(row).copy()
    split = flat.pop("split", None)
    gpus = {} if split is None else {"rollout_gpus": split.rollout_gpus, "train_gpus": split.train_gpus}
    return {**flat, **gpus}
