"""YAML files whose keys and types are a dataclass's: errors name the file, the key, and what was meant."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException


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
        kind: A dataclass; what has ``MISSING`` as its default must be told.
        tree: The file's.
        path: Of the file.

    Raises:
        ClusterError: It has other keys or types.
    """
    made = OmegaConf.structured(kind)
    for key, value in tree.items():
        with _told_with_its_key(path, str(key)):
            made.merge_with({key: value})
    with _told_with_its_key(path):
        return OmegaConf.to_object(made)


@contextlib.contextmanager
def _told_with_its_key(path: Path, within: str = "") -> Iterator[None]:
    try:
        yield
    except MissingMandatoryValue as error:
        raise ClusterError(f"{path}: {error.full_key} is missing") from error
    except (OmegaConfBaseException, ValueError) as error:
        where = str(getattr(error, "full_key", None) or "")
        keys = [within, where] if not where.startswith(within) else [where]  # OmegaConf's is within a list's element
        raise ClusterError(": ".join([str(path), *filter(None, keys), str(error).partition("\n")[0]])) from error


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
