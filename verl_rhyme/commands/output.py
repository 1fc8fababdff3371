"""Output of the commands: errors in one line, findings as a table or as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_rhyme import __version__

if TYPE_CHECKING:
    from verl_rhyme.checks.doctor import Check

#: Parameters of the commands that read a run's config.
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- ARGS...", help="Arguments of python -m verl.trainer.main_ppo.")
]
Notes = Annotated[
    list[str] | None,
    typer.Option("--note", metavar="NAME=VALUE", help="Further setting that distinguishes this run from others."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@contextlib.contextmanager
def one_line_errors(command: str, *further: type[Exception]) -> Iterator[None]:
    """Print an ``OSError``, a ``ValueError`` or an exception of ``further`` in one line and exit 1."""
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, *further)
    try:
        yield
    except kinds as error:
        print(f"{command}: {error}", file=sys.stderr)
        raise typer.Exit(1) from error


def pairs(notes: list[str] | None) -> dict[str, str]:
    return {name: value for name, _, value in (note.partition("=") for note in notes or [])}


def failures(checks: list[Check]) -> list[str]:
    return [str(check) for check in checks if check.status == "fail"]


def print_json(checks: list[Check], **further: Any) -> None:
    report = {"version": __version__, "ok": not failures(checks), "checks": [asdict(check) for check in checks]}
    print(json.dumps({**report, **further}, indent=2))


def print_counts(checks: list[Check]) -> None:
    counts = {status: sum(check.status == status for check in checks) for status in ("warn", "fail")}
    print(f"{len(checks)} checks, {counts['warn']} warnings, {counts['fail']} failures")


def print_table(checks: list[Check]) -> None:
    if not checks:
        return
    table = Table("", "check", box=None, pad_edge=False)
    table.add_column("finding", overflow="fold")
    for check in checks:
        colour = _COLOURS[check.status]
        finding = escape(check.detail) + (f"\n[{colour}]-> {escape(check.remedy)}[/]" if check.remedy else "")
        table.add_row(f"[{colour}]{check.status}[/]", escape(check.name), finding)
    Console().print(table)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Hide the output and errors of the process, including those of C libraries; an exception shows them."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield
        except BaseException:
            sink.seek(0)
            os.write(saved[1], sink.read())
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in enumerate(saved, start=1):
                os.dup2(copy, number)
                os.close(copy)
