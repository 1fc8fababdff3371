"""The command line: ``verl-rhyme COMMAND``. One function is one command."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_rhyme import __version__
from verl_rhyme.commands import ranker as ranker_command
from verl_rhyme.commands.plan import plan
from verl_rhyme.commands.simulate import profile, simulate

if TYPE_CHECKING:
    from verl_rhyme.checks.doctor import Check

app = typer.Typer(help="Faster RL of language models on verl.", no_args_is_help=True, add_completion=False)
for _command in (simulate, profile, plan):
    app.command()(_command)
app.add_typer(ranker_command.app, name="ranker")

_Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="-- ARGS...", help="As for python -m verl.trainer.main_ppo.")
]
_Notes = Annotated[
    list[str] | None, typer.Option("--note", metavar="NAME=VALUE", help="What else makes this run another than others.")
]

#: Exit status of ``verl-rhyme claim`` for a run that has nothing left to do.
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
    history_dir: Annotated[str | None, typer.Option(help="The folder you set as history.dir.")] = None,
) -> None:
    """Check versions, plugin, every seam and patch, platform, disk and shared memory; exit 1 if anything fails."""
    # vLLM, verl and torch talk a lot while they are imported; what matters of it is in the findings.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not as_json:
        print("verl-rhyme: looking at the installed verl and vLLM, 20 to 45 s", file=sys.stderr, flush=True)
    with _silenced():
        from verl_rhyme.checks.doctor import examine

        checks = examine(history_dir)
    failed = sum(check.status == "fail" for check in checks)
    if as_json:
        report = {"version": __version__, "ok": not failed, "checks": [check.to_dict() for check in checks]}
        print(json.dumps(report, indent=2))
    else:
        _print_table(checks)
        _print_counts(checks)
    if failed:
        raise typer.Exit(1)


@app.command()
def preflight(
    arguments: _Arguments = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the resolved config, and as YAML comments the estimate and findings."),
    ] = False,
    note: _Notes = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check a run before it starts: config, data, model, GPUs, memory, disk; exit 1 if anything fails.

    A dry run needs neither GPU, data nor model: what this machine lacks is a warning there. It exits 1 if the config
    would stop the run anywhere, or if its folder holds another run's checkpoints.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from verl_rhyme.checks.preflight.compose import compose
    from verl_rhyme.config import ConfigError

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not (as_json or dry_run):
        print("verl-rhyme: looking at the run and at what is installed, 20 to 45 s", file=sys.stderr, flush=True)
    try:
        with _silenced():
            config = compose(arguments or [])
            from verl_rhyme.checks.preflight.checks import examine as examine_run

            found = examine_run(config, dry_run=dry_run, notes=_pairs(note))
    except (ConfigError, ValueError, OmegaConfBaseException) as error:
        told = str(error).partition("\n    full_key:")[0]
        if (key := told.removeprefix("Missing mandatory value: ")) != told:
            told += f" -> set {key}={'vllm' if key == 'actor_rollout_ref.rollout.name' else 'VALUE'}"
        if as_json:
            print(json.dumps({"version": __version__, "ok": False, "error": told}, indent=2))
        print(f"verl-rhyme preflight: {told}", file=sys.stderr)
        raise typer.Exit(1) from error
    from verl_rhyme.checks.preflight.estimate import lines

    estimated = lines(found.estimate, found.plan, found.machine.gpu_source) if found.estimate else []
    if as_json:
        report = {
            "version": __version__,
            "ok": not found.failed,
            "checks": [check.to_dict() for check in found.checks],
            "estimate": found.estimate.to_dict() if found.estimate else None,
        }
        if dry_run:
            report["config"] = OmegaConf.to_container(config)
        print(json.dumps(report, indent=2))
    else:
        amiss = sum(check.status != "ok" for check in found.checks)  # they stand first
        findings, fine = found.checks[:amiss], found.checks[amiss:]
        if dry_run:
            print(OmegaConf.to_yaml(config), end="")
            print("\n".join(f"# {line}" for line in (*map(_line, findings), *estimated, *map(_line, fine))))
        else:
            _print_table(findings)
            print("".join(f"{line}\n" for line in estimated), end="")
            _print_table(fine)
            _print_counts(found.checks)
    if found.failed:
        if dry_run and not as_json:
            print("\n".join(f"verl-rhyme preflight: {line}" for line in _failures(found.checks)), file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def run_name(arguments: _Arguments = None, note: _Notes = None) -> None:
    """Print what the run scripts call a run's folder: preset and what differs from it, model, engine, mode."""
    from verl_rhyme.checks.preflight import run_folder
    from verl_rhyme.checks.preflight.compose import compose
    from verl_rhyme.config import ConfigError

    try:
        with _silenced():
            name = run_folder.name(compose(arguments or []), _pairs(note))
    except ConfigError as error:
        print(f"verl-rhyme: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(name)


@app.command()
def claim(
    arguments: _Arguments = None,
    check: Annotated[bool, typer.Option("--check", help="Look for what fails a dry run first.")] = False,
    note: _Notes = None,
) -> None:
    """Mark a run's checkpoint folder as its own, before it starts; the run scripts call it.

    Metrics that an earlier start left are set aside, for verl's logger would empty their file.

    Exits 1, and says why, if the folder is another run's or cannot be written, and 3 if the run is finished.
    """
    from verl_rhyme.checks.preflight import run_folder
    from verl_rhyme.checks.preflight.checks import examine
    from verl_rhyme.checks.preflight.compose import compose
    from verl_rhyme.checks.preflight.plan import check_numbers
    from verl_rhyme.config import ConfigError

    try:
        with _silenced():
            config = compose(arguments or [])
            check_numbers(config)
            checks = examine(config, dry_run=True, notes=_pairs(note)).checks if check else []
        failed = _failures(checks)
        if failed:
            print("\n".join(f"verl-rhyme: {line}" for line in failed), file=sys.stderr)
            raise typer.Exit(1)
        run_folder.claim(config, _pairs(note))
    except run_folder.ForeignFolder as error:
        print(f"verl-rhyme: {error} -> {run_folder.REMEDY}", file=sys.stderr)
        raise typer.Exit(1) from error
    except ConfigError as error:
        print(f"verl-rhyme: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    except OSError as error:
        where = run_folder.folder(config)
        print(f"verl-rhyme: cannot write to {where} ({error.strerror}): choose another RUN_DIR", file=sys.stderr)
        raise typer.Exit(1) from error
    folder = run_folder.folder(config)
    step, total = run_folder.latest_step(folder), run_folder.total_steps(config)
    if step is not None and total is not None and step >= total:
        print(
            f"already finished: {step} of {total} steps, {folder}; to go on raise EPOCHS (trainer.total_epochs), "
            "to begin anew choose another RUN_DIR"
        )
        raise typer.Exit(FINISHED)
    if step is not None:
        print(f"resuming after step {step}" + (f" of {total}" if total else ""))
    try:
        run_folder.set_metrics_aside(config)
    except OSError as error:
        print(f"verl-rhyme: cannot set earlier metrics aside ({error}): choose another RUN_DIR", file=sys.stderr)
        raise typer.Exit(1) from error


def _failures(checks: list[Check]) -> list[str]:
    return [f"{check.name}: {check.detail} -> {check.remedy}" for check in checks if check.status == "fail"]


def _pairs(notes: list[str] | None) -> dict[str, str]:
    pairs = [note.partition("=") for note in notes or []]
    return {name: value for name, _, value in pairs}


def _line(check: Check) -> str:
    remedy = f" -> {check.remedy}" if check.remedy else ""
    return f"{check.status}: {check.name}: {check.detail}{remedy}".replace("\n", " ")


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
    """Send the process's output and errors elsewhere, C libraries' too; an exception shows what was held back."""
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
    """List every option, its default and what it does; docs/options.md has the same."""
    from verl_rhyme import config

    listed = config.options()
    if as_json:
        print(json.dumps([asdict(option) for option in listed], indent=2))
        return
    for title, public in (("for users", True), ("for experts", False)):
        table = Table(f"option ({title})", "default", box=None, pad_edge=False)
        table.add_column("what it does", overflow="fold")
        for option in listed:
            if option.public is public:
                default = option.default if isinstance(option.default, str) else json.dumps(option.default)
                table.add_row(option.name, escape(default), escape(option.help))
        Console().print(table)
    print(f"All are below {config.CONFIG_PATH}; docs/options.md lists the presets, too")


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="Run folder of a training run.")],
    other: Annotated[str | None, typer.Argument(help="Run folder to hold it against, such as the stock run.")] = None,
    out: Annotated[str | None, typer.Option(help="Where the files go; default: the run folder.")] = None,
    events: Annotated[str | None, typer.Option(help="Event log of RUN, where it is not below the run folder.")] = None,
    arm: Annotated[str | None, typer.Option(help="Name of RUN; default: what its log says.")] = None,
    step: Annotated[
        int | None, typer.Option(help="Whose rollout the page shows request by request, and the trace alone.")
    ] = None,
    perfetto: Annotated[
        bool,
        typer.Option(
            "--perfetto",
            help="Write trace.json, too; Perfetto opens it. 370 bytes a request: give --step in a long run.",
        ),
    ] = False,
) -> None:
    """Table, summary.json and report.html of a run, or of two side by side."""
    from verl_rhyme.observability import report as reports

    raise typer.Exit(reports.report(run, other, out, events, arm, step, perfetto))


@app.command()
def history(
    path: Annotated[Path, typer.Argument(help="A history folder, or a checkpoint's global_step_N.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a store.")] = False,
) -> None:
    """What a history holds: prompts, responses, tokens, bytes, vocabulary."""
    from verl_rhyme.history import inspection
    from verl_rhyme.history.environment import Damaged

    try:
        for folder in inspection.find(path):
            found = inspection.inspect(folder)
            if as_json:
                print(json.dumps(asdict(found)))
                continue
            print(
                f"{found.folder}\n  {found.prompts} prompts, {found.responses} responses, {found.tokens} tokens, "
                f"{found.bytes / 1e6:.1f} MB, vocabulary {found.namespace}"
                + (f", {found.corrupt} prompts damaged" if found.corrupt else "")
            )
    except (OSError, ValueError, Damaged) as error:
        where = "" if str(path) in str(error) else f"{path}: "
        print(f"verl-rhyme history: {where}{error}", file=sys.stderr)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
