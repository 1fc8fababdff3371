"""Let verl's file logger continue the metrics of a resumed run."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from verl_rhyme.patches.core import Patch


def _open(path: str, mode: str, **kwargs: Any) -> Any:
    """Append to the metrics of a resumed run; a run from the first step overwrites the file, as in verl."""
    from verl.utils.tracking import FileLogger

    return open(path, "ab" if getattr(FileLogger, "resumed", False) else mode, **kwargs)


def _with_open(original: Any) -> Any:
    return FunctionType(
        original.__code__,
        {**original.__globals__, "open": _open},
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )


PATCH = Patch(
    name="verl_continue_metrics",
    target="verl.utils.tracking:FileLogger.__init__",
    why="a resumed run truncates the metrics file of its earlier steps; the trainer calls the logger without an option "
    "for it",
    requires="verl==0.9.1",
    source_sha256="4b6d351976ced9bd64d7f3ad017b28556753a47f7d8451793c7866b2473a6022",
    replace=_with_open,
)
