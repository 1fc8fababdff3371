"""Command line ``verl-rhyme COMMAND``; each command is a file of ``commands/``."""

from __future__ import annotations

from typing import Annotated

import typer

from verl_rhyme import __version__
from verl_rhyme.commands import ranker
from verl_rhyme.commands.claim import claim, run_name
from verl_rhyme.commands.doctor import doctor
from verl_rhyme.commands.history import history
from verl_rhyme.commands.options import options
from verl_rhyme.commands.plan import plan
from verl_rhyme.commands.preflight import preflight
from verl_rhyme.commands.report import report
from verl_rhyme.commands.simulate import simulate

app = typer.Typer(help="Faster RL of language models on verl.", no_args_is_help=True, add_completion=False)
for _command in (doctor, preflight, options, report, history, simulate, plan, run_name, claim):
    app.command()(_command)
app.add_typer(ranker.app, name="ranker")


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


if __name__ == "__main__":
    app()
