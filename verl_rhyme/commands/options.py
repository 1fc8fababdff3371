"""``verl-rhyme options``: list of all options."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


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
