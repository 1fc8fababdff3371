"""Errors of a command in one line."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import typer


@contextlib.contextmanager
def one_line_errors(command: str, *further: type[Exception]) -> Iterator[None]:
    """Print an ``OSError``, a ``ValueError`` or an exception of ``further`` in one line and exit 1."""
    kinds: tuple[type[Exception], ...] = (OSError, ValueError, *further)
    try:
        yield
    except kinds as error:
        print(f"{command}: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
