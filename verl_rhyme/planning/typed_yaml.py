"""YAML files with the keys and types of a dataclass; errors name file and key, and suggest a fix."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException


class ClusterError(ValueError):
    """A cluster file or profile is invalid; the message says where, and how to fix it."""


def refuse(*rows: tuple[Any, str]) -> None:
    """Raise :class:`ClusterError` with the text of the first row that applies."""
    for applies, text in rows:
        if applies:
            raise ClusterError(text)


def from_folder_of(file: Path, name: str) -> Path:
    return Path(os.path.normpath(file.parent / name))


def read(kind: type[Any], path: Path, overrides: Sequence[str] = ()) -> Any:
    return typed(kind, plain(path, overrides), path)


def plain(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the mapping of a file; raises :class:`ClusterError` if it is unreadable, or not a mapping.

    An override is ``key.in.it=value``; a list's element has its number, from 0, as key.
    """
    try:
        tree = OmegaConf.load(path)
    except Exception as error:  # the YAML parser's have no common name
        if isinstance(error, OSError) and error.strerror:  # else OmegaConf's: a single value
            raise ClusterError(f"{path.absolute()} cannot be read: {error.strerror}") from error
        raise ClusterError(f"{path} is not a YAML mapping: {' '.join(str(error).split())}") from error
    if not OmegaConf.is_dict(tree):
        raise ClusterError(f"{path} is not a YAML mapping of keys to values")
    for override in overrides:
        _override(tree, override, path)
    with errors_with_key(path):
        return OmegaConf.to_container(tree, resolve=True)  # type: ignore[return-value]


def typed(kind: type[Any], tree: Mapping[str, Any], path: Path) -> Any:
    """Return a dataclass ``kind`` of a file's mapping; keys with the default ``MISSING`` are required.

    Raises :class:`ClusterError` if the mapping has other keys or types.
    """
    made = OmegaConf.structured(kind)
    for key, value in tree.items():
        with errors_with_key(path, str(key)):
            made.merge_with({key: value})
    with errors_with_key(path):
        return OmegaConf.to_object(made)


@contextlib.contextmanager
def errors_with_key(path: Path, within: str = "") -> Iterator[None]:
    """Raise :class:`ClusterError` for what a file's values cause, with the key if it is known."""
    try:
        yield
    except ClusterError:
        raise
    except MissingMandatoryValue as error:
        raise ClusterError(f"{path}: {error.full_key} is missing") from error
    except (OmegaConfBaseException, ValueError, TypeError, KeyError) as error:
        where = str(getattr(error, "full_key", None) or "")
        keys = [within, where] if not where.startswith(within) else [where]  # a list's keys are relative
        raise ClusterError(": ".join([str(path), *filter(None, keys), str(error).partition("\n")[0]])) from error


def by_percentile(percentiles: Mapping[Any, float], of: str, path: Path) -> dict[float, float]:
    """Return tokens by percentile, from ``of.percentiles`` of a file; raises :class:`ClusterError` if a key is no
    number.
    """
    found = {}
    for key, tokens in percentiles.items():
        try:
            found[float(key)] = tokens
        except (TypeError, ValueError):
            raise ClusterError(f"{path}: {of}.percentiles.{key}: write a percentile such as 50: 2500") from None
    return found


def _override(tree: Any, override: str, path: Path) -> None:
    key, given, _ = override.partition("=")
    if not given or not key:
        raise ClusterError(f"{path}: write {override!r} as KEY=VALUE, such as preset=full")
    try:
        value = OmegaConf.to_container(OmegaConf.from_dotlist([f"value{override[len(key) :]}"]))
        OmegaConf.update(tree, key, value["value"])  # type: ignore[index, call-overload]
    except (IndexError, ValueError, TypeError, OmegaConfBaseException) as error:
        raise ClusterError(
            f"{path}: cannot set {override}: name an existing element of a list by its number from 0, such as "
            "replicas.0.count=4; set a whole list by replicas='[{count: 4, profile: NAME}]', a mapping by "
            "KEY='{NAME: VALUE}'"
        ) from error
    except Exception as error:  # the YAML parser's have no common name
        raise ClusterError(f"{path}: {override} is not YAML: {' '.join(str(error).split())}") from error
