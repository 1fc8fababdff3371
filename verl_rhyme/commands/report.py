"""``verl-rhyme report``: table, JSON and page of a run."""

from __future__ import annotations

from typing import Annotated

import typer


def report(
    run: Annotated[str, typer.Argument(help="Run folder of a training run.")],
    other: Annotated[str | None, typer.Argument(help="Run folder to compare with, such as the stock run.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for the files; default: the run folder.")] = None,
    events: Annotated[str | None, typer.Option(help="Event log of RUN, if it is not below the run folder.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of RUN; default: from its log.")] = None,
    step: Annotated[int | None, typer.Option(help="Step to which --perfetto limits the trace.")] = None,
    perfetto: Annotated[
        bool,
        typer.Option(
            "--perfetto",
            help="Also write trace.json for Perfetto, request by request (about 400 bytes each): see --step.",
        ),
    ] = False,
) -> None:
    """Write table, summary.json and report.html of a run, or of two runs to compare."""
    from verl_rhyme.observability import report as reports

    raise typer.Exit(reports.report(run, other, out, events, name, step, perfetto))
