"""Definition of a seam, and its comparison with the installed packages. The lists of seams are in ``seams/``."""

from __future__ import annotations

import functools
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

#: Path from a Ray actor class to the Python class that it wraps.
RAY_CLASS = ".__ray_metadata__.modified_class"


@dataclass(frozen=True)
class Seam:
    """An object of verl or vLLM that verl-rhyme relies on, and its expected shape; empty fields are not checked.

    Attributes:
        target: Object, as ``"module:qualname"``.
        used_for: Feature of verl-rhyme that breaks when the object changes.
        signature: Exact parameters without defaults and annotations, for objects that verl-rhyme overrides.
        accepts: Parameters that the object must take, for objects that verl-rhyme only calls.
        has: Attributes that the object must have.
        contains: Pieces of the object's source (without regard to blanks), for behaviour that no signature shows.
        implemented_by: ``"module:qualname"`` of a subclass in verl-rhyme, which must leave no method abstract.
    """

    target: str
    used_for: str
    signature: str | None = None
    accepts: tuple[str, ...] = ()
    has: tuple[str, ...] = ()
    contains: tuple[str, ...] = ()
    implemented_by: str | None = None

    @property
    def name(self) -> str:
        """Qualified name without Ray's wrapper, or the module."""
        module, _, qualname = self.target.partition(":")
        return qualname.replace(RAY_CLASS, "") or module


def find(target: str) -> Any:
    """Return the object at ``"module:qualname"`` (or ``"module"``).

    Raises:
        ImportError, AttributeError: The object does not exist.
    """
    module, _, qualname = target.partition(":")
    return functools.reduce(getattr, qualname.split(".") if qualname else [], importlib.import_module(module))


def check(seam: Seam) -> str | None:
    """Return the mismatch between ``seam`` and the installed packages, or ``None``; never raises."""
    try:
        found = find(seam.target)
        problems = [*_signature_problems(seam, found), *_source_problems(seam, found)]
        problems += [f"has no {name!r}" for name in seam.has if not hasattr(found, name)]
        if seam.implemented_by is not None:
            ours = find(seam.implemented_by)
            if not issubclass(ours, found):
                problems.append(f"{seam.implemented_by} is not a subclass of it")
            problems += [
                f"{seam.implemented_by} lacks {name!r}" for name in sorted(getattr(ours, "__abstractmethods__", ()))
            ]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "; ".join(problems) or None


def _signature_problems(seam: Seam, found: Any) -> list[str]:
    if seam.signature is None and not seam.accepts:
        return []
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=inspect.Parameter.empty)
        for parameter in inspect.signature(found).parameters.values()
        if parameter.name != "_ray_trace_ctx"  # Ray adds it to the methods of actor classes
    ]
    problems = [f"takes no {name!r}" for name in seam.accepts if name not in {p.name for p in parameters}]
    shape = str(inspect.Signature(parameters))
    if seam.signature is not None and shape != seam.signature:
        problems.append(f"takes {shape}, expected {seam.signature}")
    return problems


def _source_problems(seam: Seam, found: Any) -> list[str]:
    if not seam.contains:
        return []
    source = _squeeze(inspect.getsource(found))
    return [f"does not contain {piece!r}" for piece in seam.contains if _squeeze(piece) not in source]


def _squeeze(source: str) -> str:
    return "".join(source.split())
