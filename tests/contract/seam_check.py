"""Definition of a seam, and its comparison with the installed packages. The tables of seams are in ``seams/``."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Path from a Ray actor class to the Python class that it wraps.
RAY_CLASS = ".__ray_metadata__.modified_class"

#: Seams by the feature that breaks when they change, then by module or ``module:class``, then by member. The value is
#: the member's ``expected`` shape, as in :class:`Seam`.
Shapes = Mapping[str, Mapping[str, Mapping[str, str | tuple[str, ...]]]]


@dataclass(frozen=True)
class Seam:
    """An object of verl or vLLM that verl-rhyme relies on, and its expected shape.

    Attributes:
        target: Object, as ``"module:qualname"``.
        used_for: Feature of verl-rhyme that breaks when the object changes.
        expected: Exact parameters without defaults and annotations, ``"(self, keys)"``, for objects that verl-rhyme
            overrides; ``"(keys, ...)"`` for parameters that an object must take; any other text is a piece of the
            object's source (without regard to blanks), for behaviour that no signature shows. Empty: the object exists.
    """

    target: str
    used_for: str
    expected: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Qualified name without Ray's wrapper."""
        return self.target.partition(":")[2].replace(RAY_CLASS, "")


def seams(shapes: Shapes) -> Iterator[Seam]:
    """Yield the seams of a table."""
    for used_for, owners in shapes.items():
        for owner, members in owners.items():
            for member, expected in members.items():
                target = f"{owner}{'.' if ':' in owner else ':'}{member}"
                yield Seam(target, used_for, (expected,) if isinstance(expected, str) else expected)


def check(seam: Seam) -> str | None:
    """Return the mismatch between ``seam`` and the installed packages, or ``None``; never raises."""
    try:
        module, _, qualname = seam.target.partition(":")
        found = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
        return "; ".join(filter(None, (_problem(found, expected) for expected in seam.expected))) or None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _problem(found: Any, expected: str) -> str:
    """Return the mismatch between an object and one expectation, empty if there is none."""
    if not (expected.startswith("(") and expected.endswith(")")):
        present = _without_blanks(expected) in _without_blanks(inspect.getsource(found))
        return "" if present else f"does not contain {expected!r}"
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty)
        for parameter in inspect.signature(found).parameters.values()
        if parameter.name != "_ray_trace_ctx"  # Ray adds it to the methods of actor classes
    ]
    if expected.endswith(", ...)"):
        names = {parameter.name for parameter in parameters}
        missing = [name for name in expected[1 : -len(", ...)")].split(", ") if name not in names]
        return f"takes no {', '.join(map(repr, missing))}" if missing else ""
    shape = str(inspect.Signature(parameters))
    return "" if shape == expected else f"takes {shape}, expected {expected}"


def _without_blanks(source: str) -> str:
    return "".join(source.split())
