"""``verl-rhyme history``: contents of a history."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from verl_rhyme.commands.output import one_line_errors


def history(
    path: Annotated[Path, typer.Argument(help="History folder, or global_step_N of a checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per store.")] = False,
) -> None:
    """Show the contents of a history: prompts, responses, tokens, bytes, vocabulary."""
    from verl_rhyme.history import inspection
    from verl_rhyme.history.environment import CorruptEnvironment

    with one_line_errors("verl-rhyme history"):
        for folder in inspection.find(path):
            try:
                contents = inspection.inspect(folder)
            except CorruptEnvironment as error:
                raise ValueError(f"{folder}: {error}") from error
            if as_json:
                print(json.dumps(asdict(contents)))
                continue
            print(
                f"{contents.folder}\n  {contents.prompts} prompts, {contents.responses} responses, "
                f"{contents.tokens} tokens, {contents.bytes / 1e6:.1f} MB, vocabulary {contents.namespace}"
                + (f", {contents.corrupt} prompts damaged" if contents.corrupt else "")
            )
