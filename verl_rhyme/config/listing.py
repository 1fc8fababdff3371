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
    """One option."""

    name: str  # path below CONFIG_PATH, such as "drafting.floor"
    default: Any
    type: str  # for users, such as "int or null"
    public: bool  # for users; else for experts
    help: str


def options() -> list[Option]:
    """Return all options in declared order."""
    return list(_walk(RhymeConfig, ""))


def _walk(cls: type[Any], where: str) -> Iterator[Option]:
    hints = typing.get_type_hints(cls)
    for of in dataclasses.fields(cls):
        kind = hints[of.name]
        if dataclasses.is_dataclass(kind):
            yield from _walk(typing.cast("type[Any]", kind), f"{where}{of.name}.")
        else:
            default = of.default if of.default_factory is dataclasses.MISSING else of.default_factory()
            yield Option(f"{where}{of.name}", default, type_name(kind), of.metadata["public"], of.metadata["help"])
