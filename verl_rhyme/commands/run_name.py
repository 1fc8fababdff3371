"""``verl-rhyme run-name``: folder name of a run, for the run scripts."""

from __future__ import annotations

from verl_rhyme.commands.output import Arguments, Notes, one_line_errors, pairs, silenced


def run_name(arguments: Arguments = None, note: Notes = None) -> None:
    """Print the folder name of a run in the run scripts: preset and changed options, model, engine, mode."""
    from verl_rhyme.checks.preflight import run_folder
    from verl_rhyme.checks.preflight.compose import compose

    with one_line_errors("verl-rhyme"), silenced():
        name = run_folder.name(compose(arguments or []), pairs(note))
    print(name)
