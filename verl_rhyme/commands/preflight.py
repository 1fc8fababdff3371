"""``verl-rhyme preflight``: checks of a run before it starts."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from verl_rhyme.commands.output import (
    Arguments,
    Json,
    Notes,
    failures,
    one_line_errors,
    pairs,
    print_counts,
    print_json,
    print_table,
    silenced,
)


def preflight(
    arguments: Arguments = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the resolved config, with estimate and findings as YAML comments."),
    ] = False,
    note: Notes = None,
    as_json: Json = False,
) -> None:
    """Check a run before it starts: config, data, model, GPUs, memory, disk; exit 1 if a check fails.

    A dry run needs neither GPU, data nor model: if this machine lacks them, it only warns. It exits 1 if the config
    would fail on any machine, or if the run folder contains another run's checkpoints.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from verl_rhyme.checks.preflight.compose import compose

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not (as_json or dry_run):
        print("verl-rhyme: checking the run and the installed packages, 20 to 45 s", file=sys.stderr, flush=True)
    with one_line_errors("verl-rhyme preflight", OmegaConfBaseException), silenced():
        config = compose(arguments or [])
        from verl_rhyme.checks.preflight.checks import examine

        result = examine(config, elsewhere=dry_run, imports=not dry_run, notes=pairs(note))
    from verl_rhyme.checks.preflight.estimate import lines

    estimated = lines(result.estimate, result.plan, result.machine.gpu_source) if result.estimate else []
    count = sum(check.status != "ok" for check in result.checks)  # findings come first
    findings, passed = result.checks[:count], result.checks[count:]
    failed = failures(result.checks)
    if as_json:
        further = {"config": OmegaConf.to_container(config)} if dry_run else {}
        print_json(result.checks, estimate=result.estimate.to_dict() if result.estimate else None, **further)
    elif dry_run:
        print(OmegaConf.to_yaml(config), end="")
        found, rest = ([f"{check.status}: {check}" for check in checks] for checks in (findings, passed))
        print("\n".join(f"# {line}" for line in (*found, *estimated, *rest)))
        for line in failed:
            print(f"verl-rhyme preflight: {line}", file=sys.stderr)
    else:
        print_table(findings)
        print("".join(f"{line}\n" for line in estimated), end="")
        print_table(passed)
        print_counts(result.checks)
    if failed:
        raise typer.Exit(1)
