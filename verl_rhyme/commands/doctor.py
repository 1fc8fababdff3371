"""``verl-rhyme doctor``: checks of the machine and the installation."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from verl_rhyme.commands.output import Json, failures, print_counts, print_json, print_table, silenced


def doctor(
    as_json: Json = False,
    history_dir: Annotated[Path | None, typer.Option(help="History folder (option history.dir).")] = None,
) -> None:
    """Check versions, plugin, patches, platform, disk and shared memory; exit 1 if a check fails."""
    # Imports of vLLM, verl and torch log much; the checks report what matters.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not as_json:
        print("verl-rhyme: checking the installed verl and vLLM, 20 to 45 s", file=sys.stderr, flush=True)
    with silenced():
        from verl_rhyme.checks.doctor import examine

        checks = examine(history_dir)
    if as_json:
        print_json(checks)
    else:
        print_table(checks)
        print_counts(checks)
    if failures(checks):
        raise typer.Exit(1)
