"""``verl-rhyme simulate``: a run in virtual time; ``verl-rhyme profile``: what a machine costs, as it is read there."""

from __future__ import annotations

import contextlib
import errno
import json
import sys
import tempfile
from collections.abc import Iterator
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
    timeline: Annotated[Path | None, typer.Option(help="Write Chrome trace JSON here; Perfetto opens it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write a run folder here that verl-rhyme report reads.")] = None,
) -> None:
    """A run in virtual time, with the scheduler, placement and length predictor of training."""
    from rich.progress import Progress

    from verl_rhyme.observability import trace
    from verl_rhyme.simulation import cluster_file, event_log
    from verl_rhyme.simulation.run import Simulation

    try:
        loaded = cluster_file.load(cluster, overrides or [])
        if out is not None:
            with _writing("--out", out):
                event_log.check(out)
                _check_folder(out)
        if timeline is not None:
            _check_file("--timeline", timeline)
        for line in loaded.unread:
            print(f"verl-rhyme simulate: {line}", file=sys.stderr)
        rules, drafts = loaded.scenario.rules, max(loaded.scenario.drafts.acceptance) > 1
        load = f"{loaded.total} prompts, {loaded.updates} updates of {rules.batch_prompts}"
        without = "" if drafts else "; without drafts (drafts.acceptance)"
        print(f"verl-rhyme simulate: {load}; rules in force: {rules.summary}{without}", file=sys.stderr)
        segments: list | None = [] if timeline or out else None
        simulation = Simulation(loaded.scenario, loaded.prompts, loaded.updates, segments)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("updates", total=loaded.updates)
            simulation.run(lambda step: progress.update(task, completed=step.version + 1))
        _print_simulated(simulation, loaded, as_json)
        log = simulation, segments or [], loaded.epoch_prompts
        if timeline is not None:
            trace.write(timeline, *event_log.columns(*log))
        if out is not None:
            event_log.write(out, " ".join(["simulated:", cluster.stem, *(overrides or [])]), *log)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"verl-rhyme simulate: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def _print_simulated(simulation: Simulation, loaded: Loaded, as_json: bool) -> None:
    from verl_rhyme.simulation import summary

    steps = simulation.steps
    if as_json:
        for step in steps:
            print(json.dumps(summary.row(step)))
        about = {"sources": loaded.sources, "prompts": loaded.total, "unread": loaded.unread}
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


@contextlib.contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    """Errors of the operating system within it are about this option's path.

    Raises:
        ValueError: Of each.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"cannot write {option} {path} ({reason}): name another") from error


def _check_folder(folder: Path) -> None:
    """Make it, and write into it what leaves nothing behind.

    Raises:
        OSError: That fails.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is no folder") from error
    tempfile.TemporaryFile(dir=folder).close()


def _check_file(option: str, path: Path) -> None:
    """See that a file can be written, and make its folder; what is in it stays.

    Raises:
        ValueError: It cannot.
    """
    with _writing(option, path):
        _check_folder(path.parent)
        if path.exists():
            path.open("a").close()


def profile(
    run: Annotated[Path, typer.Argument(help="Folder of a run; a short one is enough.")],
    out: Annotated[Path | None, typer.Option(help="Where the profile goes; default: RUN/profile.yaml.")] = None,
) -> None:
    """What a run's own event log tells of its machine: a profile that simulate reads, with its error."""
    from verl_rhyme.simulation import fitted, recorded

    path = run / "profile.yaml" if out is None else out
    try:
        log = recorded.read(run)
        _check_file("--out", path)
        found = fitted.fit(log)
        source = f"measured: {run.absolute().name}, {log.info.get('engine', 'an unknown engine')}, {found.date}"
        path.write_text(fitted.yaml(found, source))
    except (OSError, ValueError) as error:
        print(f"verl-rhyme profile: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    table = Table("", "seconds", "+-", "", box=None, pad_edge=False)
    for row in fitted.rows(found):
        table.add_row(*row)
    Console().print(table, highlight=False)
    for line in fitted.lines(found):
        print(line)
    print(f"{path}: name it as a replica's profile in a cluster file; one beside it that plays this run again:")
    print(fitted.cluster(found, path), end="")
