"""``verl-rhyme simulate``: a run in virtual time; ``verl-rhyme profile``: what a machine costs, as it is read there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from verl_rhyme.simulation.cluster_file import Loaded
    from verl_rhyme.simulation.run import Simulation


def simulate(
    cluster: Annotated[Path, typer.Argument(help="A cluster file, such as examples/simulate/dapo32b.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Over the file's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a step, and one of them all.")] = False,
) -> None:
    """A run in virtual time, with the scheduler, placement and length predictor of training."""
    from rich.progress import Progress

    from verl_rhyme.simulation import cluster_file
    from verl_rhyme.simulation.run import Simulation

    try:
        loaded = cluster_file.load(cluster, overrides or [])
        rules, drafts = loaded.scenario.rules, max(loaded.scenario.drafts.acceptance) > 1
        load = f"{loaded.total} prompts, {loaded.updates} updates of {rules.batch_prompts}"
        without = "" if drafts else "; without drafts (drafts.acceptance)"
        print(f"verl-rhyme simulate: {load}; rules in force: {rules.summary}{without}", file=sys.stderr)
        simulation = Simulation(loaded.scenario, loaded.prompts, loaded.updates)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("updates", total=loaded.updates)
            simulation.run(lambda step: progress.update(task, completed=step.version + 1))
    except (OSError, ValueError, RuntimeError) as error:
        print(f"verl-rhyme simulate: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    _print_simulated(simulation, loaded, as_json)


def _print_simulated(simulation: Simulation, loaded: Loaded, as_json: bool) -> None:
    from verl_rhyme.simulation import summary

    steps = simulation.steps
    if as_json:
        for step in steps:
            print(json.dumps(summary.row(step)))
        about = {"sources": loaded.sources, "prompts": loaded.total}
        print(json.dumps({**summary.whole(simulation), **about}))
        return
    table = Table("update", *summary.COLUMNS, box=None, pad_edge=False)
    for step in steps:
        table.add_row(str(step.version + 1), *summary.cells(step))
    Console().print(table)
    for line in summary.lines(simulation):
        print(line)
    for source in loaded.sources:
        print(f"what steps cost: {source}")


def profile(
    run: Annotated[Path, typer.Argument(help="Folder of a run; a short one is enough.")],
    out: Annotated[Path | None, typer.Option(help="Where the profile goes; default: RUN/profile.yaml.")] = None,
) -> None:
    """What a run's own event log tells of its machine: a profile that simulate reads, with its error."""
    from verl_rhyme.simulation import fitted, recorded

    path = run / "profile.yaml" if out is None else out
    try:
        found = fitted.fit(recorded.read(run), run.absolute().name)
        profile = fitted.yaml(found)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(profile)
    except (OSError, ValueError) as error:
        print(f"verl-rhyme profile: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(profile, end="")
    for note in found.notes:
        print(f"verl-rhyme profile: {note}", file=sys.stderr)
    print(f"\n{path}: name it as a replica's profile in a cluster file", file=sys.stderr)
