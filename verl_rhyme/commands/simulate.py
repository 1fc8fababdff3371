"""``verl-rhyme simulate``: a run in virtual time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from verl_rhyme.commands.output import one_line_errors

if TYPE_CHECKING:
    from verl_rhyme.simulation.cluster_file import Loaded
    from verl_rhyme.simulation.run import Simulation


def simulate(
    cluster: Annotated[Path, typer.Argument(help="Cluster file, such as examples/simulate/dapo32b.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of the file's values.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per step, then a summary.")] = False,
) -> None:
    """Simulate a run in virtual time, with the scheduler, placement and length predictor of training."""
    from rich.progress import Progress

    from verl_rhyme.simulation import cluster_file
    from verl_rhyme.simulation.run import Simulation

    with one_line_errors("verl-rhyme simulate", RuntimeError):
        loaded = cluster_file.load(cluster, overrides or [])
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
