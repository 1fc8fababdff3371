"""How an option is refused: where it is, what it may be, what is near."""

from __future__ import annotations

import difflib
import math
import types
import typing
from typing import Any

#: Where the tree lives in verl's config; verl passes it to every rollout worker untouched.
CONFIG_PATH = "actor_rollout_ref.rollout.custom.rhyme"


class ConfigError(ValueError):
    """The configuration is wrong; the message says where and how to mend it."""


def coerce(value: Any, hint: Any, path: str) -> Any:
    """A value of the tree as its type: whole numbers may be written as floats, and floats as whole numbers.

    Args:
        value: As the config has it.
        hint: A type, or a union of some.
        path: Of the key.

    Raises:
        ConfigError: It is of another type, or not finite.
    """
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in allowed:
        return None
    for kind in allowed:
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ConfigError(f"{CONFIG_PATH}.{path} must be finite, not {value!r}")
            return float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, typing.get_origin(kind) or kind) and not (kind is int and isinstance(value, bool)):
            return value
    names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
    raise ConfigError(f"{CONFIG_PATH}.{path} must be {names}, not {value!r}")


def require(ok: bool, path: str, value: Any, allowed: str, hint: str = "") -> None:
    if not ok:
        raise ConfigError(f"{CONFIG_PATH}.{path} must be {allowed}, not {value!r}{hint}")


def nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
