"""Declare options and check their values; an error names the option, the allowed values and the nearest match."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Any

#: Path of our options in verl's config; verl passes them unchanged to every rollout worker.
CONFIG_PATH = "actor_rollout_ref.rollout.custom.rhyme"

#: What to do where a command has another trainer.
V1_ONLY = (
    "but rhyme extends verl's V1 trainer: start python -m verl.trainer.main_ppo with the same arguments, or set "
    f"{CONFIG_PATH}.enable=false"
)


class ConfigError(ValueError):
    """Invalid configuration; the message names the option and the remedy."""


class Unusable(ConfigError):
    """Something that a run needs cannot be used: ``detail`` says what and why, ``remedy`` what to do."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(f"{detail}; {remedy}")
        self.detail, self.remedy = detail, remedy


def option(default: Any, help: str, *, public: bool = False) -> Any:
    """Return the dataclass field of an option, ``public`` for users, else for experts. ``help`` is one or two sentences
    for users, in ``docs/options.md`` and ``verl-rhyme options``.
    """
    return field(default=default, metadata=option_metadata(help, public))


def option_metadata(help: str, public: bool = False) -> dict[str, Any]:
    return {"help": help, "public": public}


def coerce(value: Any, hint: Any, path: str) -> Any:
    """Convert a value to the type of the option at ``path``: a type, a ``Literal``, or a union of them.

    ``2.0`` is accepted as an int, and ``2`` as a float. Raises ConfigError if the value has another type, is none of
    the literals, is empty, or is not finite.
    """
    allowed = kinds(hint)
    for kind in allowed if value != "" else ():
        if typing.get_origin(kind) is typing.Literal:
            if isinstance(value, str) and value in typing.get_args(kind):
                return value
        elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ConfigError(f"{CONFIG_PATH}.{path} must be finite, not {value!r}")
            return float(value)
        elif kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        elif isinstance(value, typing.get_origin(kind) or kind) and not (kind is int and isinstance(value, bool)):
            return value
    given = "empty" if value == "" else repr(value)
    near = nearest(str(value), [name for kind in allowed for name in typing.get_args(kind) if isinstance(name, str)])
    raise ConfigError(f"{CONFIG_PATH}.{path} must be {type_name(hint)}, not {given}{near}")


def kinds(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def type_name(hint: Any) -> str:
    """Return the name of a type for users: ``"int or null"``, ``"group or trajectory or null"``."""
    names: list[str] = []
    for kind in kinds(hint):
        if typing.get_origin(kind) is typing.Literal:
            names += typing.get_args(kind)
        else:
            names.append("null" if kind is type(None) else (typing.get_origin(kind) or kind).__name__)
    return " or ".join(names)


def typed_options(
    path: str, chosen: str, table: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert the options at ``path`` of a choice (a placement) to their types, which ``table`` has for each choice.

    Raises ConfigError if the choice does not have an option, or an option has another type.
    """
    known = table[chosen]
    for name in options:
        if name not in known:
            owners = [other for other, names in table.items() if name in names]
            hint = f"; it is an option of {' and '.join(owners)}" if owners else nearest(name, known)
            has = f"{chosen} has {', '.join(known) or 'none'}"
            raise ConfigError(f"unknown option {CONFIG_PATH}.{path}.{name}: {has}{hint}")
    return {name: coerce(value, known[name], f"{path}.{name}") for name, value in options.items()}


def require(ok: bool, path: str, value: Any, allowed: str, hint: str = "") -> None:
    if not ok:
        raise ConfigError(f"{CONFIG_PATH}.{path} must be {allowed}, not {value!r}{hint}")


def require_each(section: str, options: Any, **allowed: tuple[bool, str]) -> None:
    """Require the value of each option of a section: whether it is allowed, and which values are."""
    for name, (ok, values) in allowed.items():
        require(ok, f"{section}.{name}", getattr(options, name), values)


def nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
