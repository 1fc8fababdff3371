"""Command line ``verl-rhyme COMMAND``, with one function per command."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_rhyme import __version__
from verl_rhyme.commands import ranker as ranker_command
from verl_rhyme.commands.errors import one_line_errors
from verl_rhyme.commands.plan import plan
from verl_rhyme.commands.simulate import simulate

if TYPE_CHECKING:
    from verl_rhyme.checks.doctor import Check

app = typer.Typer(help="Faster RL of language models on verl.", no_args_is_help=True, add_completion=False)
for _command in (simulate, plan):
    app.command()(_command)
app.add_typer(ranker_command.app, name="ranker")

_Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- ARGS...", help="Arguments of python -m verl.trainer.main_ppo.")
]
_Notes = Annotated[
    list[str] | None,
    typer.Option("--note", metavar="NAME=VALUE", help="Further setting that distinguishes this run from others."),
]

#: Exit status of ``verl-rhyme claim`` for a finished run.
FINISHED = 3

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"verl-rhyme {__version__}")
        raise typer.Exit()


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    history_dir: Annotated[Path | None, typer.Option(help="History folder (option history.dir).")] = None,
) -> None:
    """Check versions, plugin, patches, platform, disk and shared memory; exit 1 if a check fails."""
    # Imports of vLLM, verl and torch log much; the checks report what matters.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not as_json:
        print("verl-rhyme: checking the installed verl and vLLM, 20 to 45 s", file=sys.stderr, flush=True)
    with _silenced():
        from verl_rhyme.checks.doctor import examine

        checks = examine(history_dir)
    if as_json:
        _print_json(checks)
    else:
        _print_table(checks)
        _print_counts(checks)
    if _failures(checks):
        raise typer.Exit(1)


@app.command()
def preflight(
    arguments: _Arguments = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the resolved config, with estimate and findings as YAML comments."),
    ] = False,
    note: _Notes = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a run before it starts: config, data, model, GPUs, memory, disk; exit 1 if a check fails.

    A dry run needs neither GPU, data nor model: if this machine lacks them, it only warns. It exits 1 if the config
    would fail on any machine, or if the run folder contains another run's checkpoints.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from verl_rhyme.checks.preflight.compose import compose
    from verl_rhyme.config import ConfigError

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not (as_json or dry_run):
        print("verl-rhyme: checking the run and the installed packages, 20 to 45 s", file=sys.stderr, flush=True)
    try:
        with _silenced():
            config = compose(arguments or [])
            from verl_rhyme.checks.preflight.checks import examine as examine_run

            result = examine_run(config, elsewhere=dry_run, imports=not dry_run, notes=_pairs(note))
    except (ConfigError, ValueError, OmegaConfBaseException) as error:
        message = str(error).partition("\n    full_key:")[0]
        if (key := message.removeprefix("Missing mandatory value: ")) != message:
            message += f" -> set {key}=VALUE"
        if as_json:
            print(json.dumps({"version": __version__, "ok": False, "error": message}, indent=2))
        print(f"verl-rhyme preflight: {message}", file=sys.stderr)
        raise typer.Exit(1) from error
    from verl_rhyme.checks.preflight.estimate import lines

    estimated = lines(result.estimate, result.plan, result.machine.gpu_source) if result.estimate else []
    count = sum(check.status != "ok" for check in result.checks)  # findings come first
    findings, passed = result.checks[:count], result.checks[count:]
    if as_json:
        further = {"config": OmegaConf.to_container(config)} if dry_run else {}
        _print_json(result.checks, estimate=result.estimate.to_dict() if result.estimate else None, **further)
    elif dry_run:
        print(OmegaConf.to_yaml(config), end="")
        print("\n".join(f"# {line}" for line in (*map(_line, findings), *estimated, *map(_line, passed))))
    else:
        _print_table(findings)
        print("".join(f"{line}\n" for line in estimated), end="")
        _print_table(passed)
        _print_counts(result.checks)
    failed = _failures(result.checks)
    if failed and dry_run and not as_json:
        print("\n".join(f"verl-rhyme preflight: {line}" for line in failed), file=sys.stderr)
    if failed:
        raise typer.Exit(1)


@app.command()
def run_name(arguments: _Arguments = None, note: _Notes = None) -> None:
    """Print the folder name of a run in the run scripts: preset and changed options, model, engine, mode."""
    from verl_rhyme.checks.preflight import run_folder
    from verl_rhyme.checks.preflight.compose import compose

    with one_line_errors("verl-rhyme"), _silenced():
        name = run_folder.name(compose(arguments or []), _pairs(note))
    print(name)


@app.command()
def claim(
    arguments: _Arguments = None,
    check: Annotated[bool, typer.Option("--check", help="Run the checks of a dry run first.")] = False,
    note: _Notes = None,
) -> None:
    """Claim the checkpoint folder of a run before it starts; the run scripts call this command.

    Exits 1 with an error if the folder belongs to another run, is in use or cannot be written, and 3 if the run is
    finished.
    """
    from verl_rhyme.checks.preflight import run_folder
    from verl_rhyme.checks.preflight.checks import examine
    from verl_rhyme.checks.preflight.compose import compose
    from verl_rhyme.checks.preflight.plan import check_numbers
    from verl_rhyme.checks.run_lock import FolderInUse
    from verl_rhyme.config import ConfigError

    def refuse(problem: str) -> typer.Exit:
        print(f"verl-rhyme: {problem}", file=sys.stderr)
        return typer.Exit(1)

    with one_line_errors("verl-rhyme"), _silenced():
        config = compose(arguments or [])
        check_numbers(config)
        found = examine(config, elsewhere=True, imports=False, notes=_pairs(note)) if check else None
    if failed := _failures(found.checks if found else []):
        raise refuse("\nverl-rhyme: ".join(failed))
    folder = run_folder.folder(config)
    try:
        run_folder.claim(config, _pairs(note))
        step, total = run_folder.latest_step(folder), run_folder.total_steps(config)
        if step is not None and total is not None and step >= total:
            print(
                f"already finished: {step} of {total} steps, {folder}; to continue, raise EPOCHS "
                "(trainer.total_epochs); to start again, choose another RUN_DIR"
            )
            raise typer.Exit(FINISHED)
        if step is not None:
            print(f"resuming after step {step}" + (f" of {total}" if total else ""))
    except run_folder.ForeignFolder as error:
        raise refuse(f"{error} -> {run_folder.REMEDY}") from error
    except (ConfigError, FolderInUse) as error:
        raise refuse(str(error)) from error
    except OSError as error:
        raise refuse(f"cannot write to {folder} ({error.strerror}): free space, or choose another RUN_DIR") from error


def _failures(checks: list[Check]) -> list[str]:
    return [str(check) for check in checks if check.status == "fail"]


def _pairs(notes: list[str] | None) -> dict[str, str]:
    pairs = [note.partition("=") for note in notes or []]
    return {name: value for name, _, value in pairs}


def _line(check: Check) -> str:
    return f"{check.status}: {check}"


def _print_json(checks: list[Check], **further: Any) -> None:
    ok = not _failures(checks)
    report = {"version": __version__, "ok": ok, "checks": [asdict(check) for check in checks], **further}
    print(json.dumps(report, indent=2))


def _print_counts(checks: list[Check]) -> None:
    counts = {status: sum(check.status == status for check in checks) for status in ("warn", "fail")}
    print(f"{len(checks)} checks, {counts['warn']} warnings, {counts['fail']} failures")


def _print_table(checks: list[Check]) -> None:
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
def _silenced() -> Iterator[None]:
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
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
            os.close(saved[0])
            os.close(saved[1])


@app.command()
def options(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects.")] = False) -> None:
    """List all options with defaults and descriptions, as in docs/options.md."""
    from verl_rhyme import config

    listed = config.options()
    if as_json:
        print(json.dumps([asdict(option) for option in listed], indent=2))
        return
    for title, public in (("for users", True), ("for experts", False)):
        table = Table(f"option ({title})", "default", box=None, pad_edge=False)
        table.add_column("description", overflow="fold")
        for option in listed:
            if option.public is public:
                default = option.default if isinstance(option.default, str) else json.dumps(option.default)
                table.add_row(option.name, escape(default), escape(option.help))
        Console().print(table)
    print(f"All options are below {config.CONFIG_PATH}; docs/options.md also lists the presets")


@app.command()
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


@app.command()
def history(
    path: Annotated[Path, typer.Argument(help="History folder, or global_step_N of a checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per store.")] = False,
) -> None:
    """Show the contents of a history: prompts, responses, tokens, bytes, vocabulary."""
    from verl_rhyme.history import inspection
    from verl_rhyme.history.environment import CorruptEnvironment

    try:
        for folder in inspection.find(path):
            contents = inspection.inspect(folder)
            if as_json:
                print(json.dumps(asdict(contents)))
                continue
            print(
                f"{contents.folder}\n  {contents.prompts} prompts, {contents.responses} responses, "
                f"{contents.tokens} tokens, {contents.bytes / 1e6:.1f} MB, vocabulary {contents.namespace}"
                + (f", {contents.corrupt} prompts damaged" if contents.corrupt else "")
            )
    except (OSError, ValueError, CorruptEnvironment) as error:
        where = "" if str(path) in str(error) else f"{path}: "
        print(f"verl-rhyme history: {where}{error}", file=sys.stderr)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
