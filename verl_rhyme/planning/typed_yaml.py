"""YAML files whose keys and types are a dataclass's: errors name the file, the key, and what was meant."""

from __future__ import annotations

import contextlib
import difflib
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import MISSING, BooleanNode, FloatNode, IntegerNode, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException, ValidationError


class ClusterError(ValueError):
    """A cluster file or profile is wrong; the message says where and how to mend it."""


def from_folder_of(file: Path, name: str) -> Path:
    """A path that a file names, from its folder on."""
    return Path(os.path.normpath(file.parent / name))


def read(kind: type[Any], path: Path, overrides: Sequence[str] = ()) -> Any:
    """A ``kind``, from a file: :func:`plain`, then :func:`typed`."""
    return typed(kind, plain(path, overrides), path)


def plain(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The mapping that a file has.

    Args:
        path: Of the YAML.
        overrides: ``key.in.it=value``; an element of a list has its number as key, from 0 on.

    Raises:
        ClusterError: It cannot be read, or is no mapping.
    """
    try:
        told = OmegaConf.load(path)
    except Exception as error:  # the YAML parser's have no common name
        if isinstance(error, OSError) and error.strerror:  # else OmegaConf's: a single value
            raise ClusterError(f"{path} cannot be read: {error.strerror}") from error
        raise ClusterError(f"{path} is no YAML mapping: {' '.join(str(error).split())}") from error
    if not OmegaConf.is_dict(told):
        raise ClusterError(f"{path} is no YAML mapping of keys to values")
    for override in overrides:
        _override(told, override, path)
    with _told_with_its_key(path):
        return OmegaConf.to_container(told, resolve=True)  # type: ignore[return-value]


def typed(kind: type[Any], tree: Mapping[str, Any], path: Path) -> Any:
    """A ``kind`` of a mapping.

    Args:
        kind: A dataclass; what has ``MISSING`` as its default must be told before it is read.
        tree: The file's.
        path: Of the file.

    Raises:
        ClusterError: It has other keys or types.
    """
    with _told_with_its_key(path):
        _check_shape(kind, tree, "", path)
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), tree))


@contextlib.contextmanager
def _told_with_its_key(path: Path) -> Iterator[None]:
    try:
        yield
    except ClusterError:
        raise
    except MissingMandatoryValue as error:
        raise ClusterError(f"{path}: {error.full_key} is missing") from error
    except (OmegaConfBaseException, ValueError) as error:
        where = getattr(error, "full_key", None)
        what = str(error).partition("\n")[0]
        raise ClusterError(f"{path}: {where + ': ' if where else ''}{what}") from error


def by_percentile(told: Mapping[Any, float], of: str, path: Path) -> dict[float, float]:
    """Tokens by percentile, as ``of.percentiles`` of a file has them.

    Raises:
        ClusterError: A key is no number.
    """
    found = {}
    for key, tokens in told.items():
        try:
            found[float(key)] = tokens
        except (TypeError, ValueError):
            raise ClusterError(f"{path}: {of}.percentiles.{key}: {key!r} is no percentile, such as 50: 2500") from None
    return found


def _override(tree: Any, override: str, path: Path) -> None:
    """Set what ``KEY=VALUE`` says; a mapping is merged."""
    key, given, _ = override.partition("=")
    if not given or not key:
        raise ClusterError(f"{path}: {override!r} is no KEY=VALUE, such as preset=full")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value{override[len(key) :]}"]))
        OmegaConf.update(tree, key, value["value"])  # type: ignore[index, call-overload]
    except (IndexError, ValueError, TypeError, OmegaConfBaseException) as error:
        raise ClusterError(
            f"{path}: cannot set {override}: a list's elements that are there have numbers from 0 on, such as "
            "replicas.0.count=4; a whole list is set by replicas='[{count: 4, profile: NAME}]', a mapping by "
            "KEY='{NAME: VALUE}'"
        ) from error
    except Exception as error:  # the YAML parser's have no common name
        raise ClusterError(f"{path}: {override} is no YAML: {' '.join(str(error).split())}") from error


_LIST_SUCH_AS = {
    "replicas": "[{count: 4, profile: NAME}]",
    "kinds": "[{name: h800, memory: 80e9}]",
    "sites": "[{name: here, kind: h800, gpus: 64}]",
    "links": "[{between: [east, west], gbps: 80}]",
    "profiles": "[qwen2.5-32b-h800-tp4]",
    "between": "[east, west]",
}
_SINGLE: dict[Any, tuple[type[Any], str]] = {
    int: (IntegerNode, "a whole number"),
    float: (FloatNode, "a number"),
    bool: (BooleanNode, "true or false"),
}


def _check_shape(kind: Any, value: Any, key: str, path: Path) -> None:
    """See that keys are known, and mappings, lists and single values where they belong, all the way down."""
    if isinstance(kind, types.UnionType):
        if value is None:
            return
        [kind] = set(get_args(kind)) - {types.NoneType}
    fields = get_type_hints(kind) if is_dataclass(kind) else {}
    if kind is Any or value == MISSING:
        return
    if fields or get_origin(kind) is dict:
        if not isinstance(value, dict):
            keys = f" of {', '.join(fields)}" if fields else ""
            raise ClusterError(f"{path}: {key} must be a mapping{keys}, such as {{KEY: VALUE}}, not {value!r}")
        for name, each in value.items() if fields else ():
            inner = f"{key}.{name}" if key else name
            if name not in fields:
                near = difflib.get_close_matches(str(name), fields, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(fields)}"
                raise ClusterError(f"{path}: unknown key {inner}: {hint}")
            _check_shape(fields[name], each, inner, path)
    elif get_origin(kind) is list:
        if not isinstance(value, list):
            such = _LIST_SUCH_AS.get(key.rpartition(".")[2], "[1, 2]")
            raise ClusterError(f"{path}: {key} must be a list such as {such}, not {value!r}")
        for i, each in enumerate(value):
            _check_shape(get_args(kind)[0], each, f"{key}.{i}", path)
    elif isinstance(value, dict | list):
        raise ClusterError(f"{path}: {key} must be a single value, not {value!r}")
    elif kind in _SINGLE:
        node, what = _SINGLE[kind]
        try:
            node(value, is_optional=False)
        except ValidationError as error:
            raise ClusterError(f"{path}: {key} must be {what}, not {value!r}") from error
