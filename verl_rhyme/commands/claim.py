"""``verl-rhyme claim`` and ``run-name``: check a run, name and claim its checkpoint folder, for the run scripts."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from verl_rhyme.commands.output import Arguments, Notes, failures, one_line_errors, pairs, silenced

#: Exit status for a finished run.
FINISHED = 3

#: Checks of the files that the run script makes once the folder is claimed.
MADE_LATER = ("data.train_files", "data.val_files")


def claim(
    arguments: Arguments = None,
    check: Annotated[bool, typer.Option("--check", help="Check the run first, except for its data.")] = False,
    note: Notes = None,
) -> None:
    """Claim the checkpoint folder of a run before it starts; the run scripts call this command.

    Exits 1 with an error if the folder belongs to another run, is in use or cannot be written, and 3 if the run is
    finished.
    """
    from omegaconf import OmegaConf

    from verl_rhyme.checks.preflight import run_folder, values
    from verl_rhyme.checks.preflight.checks import examine
    from verl_rhyme.checks.preflight.compose import compose
    from verl_rhyme.checks.preflight.machine import ADDRESS, in_cluster
    from verl_rhyme.checks.startup import SKIP
    from verl_rhyme.config import ConfigError

    with one_line_errors("verl-rhyme"), silenced():
        config = compose(arguments or [])
        values.check(config)
        elsewhere = in_cluster(OmegaConf.select(config, ADDRESS)) or os.environ.get(SKIP) == "1"
        found = examine(config, elsewhere, imports=False, notes=pairs(note)).checks if check else []
        found = [each for each in found if each.name not in MADE_LATER]
    folder = run_folder.folder(config)
    with one_line_errors("verl-rhyme"):
        if failed := failures(found):
            raise ConfigError("\nverl-rhyme: ".join(failed))
        run_folder.claim(config, pairs(note))
        step, total = run_folder.latest_step(folder), run_folder.total_steps(config)
    if step is None:
        return
    if total is not None and step >= total:
        print(
            f"already finished: {step} of {total} steps, {folder}; to continue, raise EPOCHS "
            "(trainer.total_epochs); to start again, choose another RUN_DIR"
        )
        raise typer.Exit(FINISHED)
    print(f"resuming after step {step}" + (f" of {total}" if total else ""))


def run_name(arguments: Arguments = None, note: Notes = None) -> None:
    """Print the folder name of a run in the run scripts: preset and changed options, model, engine, mode."""
    from verl_rhyme.checks.preflight import run_folder
    from verl_rhyme.checks.preflight.compose import compose

    with one_line_errors("verl-rhyme"), silenced():
        name = run_folder.name(compose(arguments or []), pairs(note))
    print(name)
