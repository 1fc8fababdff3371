"""List all options as records."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_rhyme.config.checks import type_name
from verl_rhyme.config.root import RhymeConfig


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: Path below :data:`~verl_rhyme.config.CONFIG_PATH`, such as ``"drafting.floor"``.
        default: Default value.
        type: Name of the type for users, such as ``"int or null"``.
        public: The option is for users; else it is for experts.
        help: Help text.
    """

    name: str
    default: Any
    type: str
    public: bool
    help: str


def options() -> list[Option]:
    """Return all options in declared order."""
    return list(_walk(RhymeConfig, ""))


def sections() -> dict[str, str]:
    """Return the first docstring line of each section's class, by the section's path."""
    return dict(_sections(RhymeConfig, ""))


def _walk(cls: type[Any], where: str) -> Iterator[Option]:
    for name, kind, of in _fields(cls):
        if dataclasses.is_dataclass(kind):
            yield from _walk(typing.cast("type[Any]", kind), f"{where}{name}.")
        else:
            default = of.default if of.default_factory is dataclasses.MISSING else of.default_factory()
            yield Option(f"{where}{name}", default, type_name(kind), of.metadata["public"], of.metadata["help"])


def _sections(cls: type[Any], where: str) -> Iterator[tuple[str, str]]:
    for name, kind, _ in _fields(cls):
        if dataclasses.is_dataclass(kind):
            yield f"{where}{name}", (kind.__doc__ or "").splitlines()[0].replace("``", "`")
            yield from _sections(typing.cast("type[Any]", kind), f"{where}{name}.")


def _fields(cls: type[Any]) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    hints = typing.get_type_hints(cls)
    yield from ((of.name, hints[of.name], of) for of in dataclasses.fields(cls))
