"""How an option is declared, and how a value is refused: where it is, what it may be, what is near."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Any

#: Where the tree lives in verl's config; verl passes it to every rollout worker untouched.
CONFIG_PATH = "actor_rollout_ref.rollout.custom.rhyme"


class ConfigError(ValueError):
    """The configuration is wrong; the message says where and how to mend it."""


def option(default: Any, help: str, *, public: bool = False) -> Any:
    """A dataclass field that is an option.

    Args:
        default: Its default.
        help: What it does, in a sentence or two: the one source of the YAML groups' comments, ``docs/options.md`` and
            ``verl-rhyme options``.
        public: For users; else for experts, who know what it changes.
    """
    return field(default=default, metadata=about(help, public))


def about(help: str, public: bool = False) -> dict[str, Any]:
    """The metadata of an option's field; see :func:`option`."""
    return {"help": help, "public": public}


def coerce(value: Any, hint: Any, path: str) -> Any:
    """A value of the tree as its type: whole numbers may be written as floats, and floats as whole numbers.

    Args:
        value: As the config has it.
        hint: A type, a ``Literal``, or a union of some.
        path: Of the key.

    Raises:
        ConfigError: It is of another type, none of the literals, or not finite.
    """
    allowed = kinds(hint)
    for kind in allowed:
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
    near = nearest(str(value), [name for kind in allowed for name in typing.get_args(kind) if isinstance(name, str)])
    raise ConfigError(f"{CONFIG_PATH}.{path} must be {type_name(hint)}, not {value!r}{near}")


def kinds(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def type_name(hint: Any) -> str:
    """A type in words: ``"int or null"``, ``"group or trajectory or null"``."""
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
    """The ``options`` of a choice (a placement, a ranker) as their types.

    Args:
        path: Of the options.
        chosen: A key of ``table``.
        table: The options of each choice, with their types.
        options: As the config has them.

    Raises:
        ConfigError: An option that the choice does not have, or of another type.
    """
    known = table[chosen]
    for name in options:
        if name not in known:
            whose = [other for other, names in table.items() if name in names]
            hint = f"; it is of {' and '.join(whose)}" if whose else nearest(name, known)
            has = f"{chosen} has {', '.join(known) or 'none'}"
            raise ConfigError(f"unknown option {CONFIG_PATH}.{path}.{name}: {has}{hint}")
    return {name: coerce(value, known[name], f"{path}.{name}") for name, value in options.items()}


def require(ok: bool, path: str, value: Any, allowed: str, hint: str = "") -> None:
    if not ok:
        raise ConfigError(f"{CONFIG_PATH}.{path} must be {allowed}, not {value!r}{hint}")


def nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
