"""Cost of a replica: calculated from model, GPU, tensor parallel size and dtype, or measured, in a YAML file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import MISSING

from verl_rhyme.config.checks import nearest
from verl_rhyme.planning import roofline
from verl_rhyme.planning.architecture import PUBLISHED, Architecture, find, read_json
from verl_rhyme.planning.cost import ReplicaCost
from verl_rhyme.planning.typed_yaml import ClusterError, from_folder_of, read


@dataclass
class ProfileFile(ReplicaCost):
    """A measured :class:`~verl_rhyme.planning.cost.ReplicaCost`, and the source of its figures."""

    source: str = MISSING


class Profile(NamedTuple):
    """A kind of replica, and the source of its figures."""

    cost: ReplicaCost
    source: str


def measured(name: str, named_in: Path | None = None) -> Profile:
    """Return the profile in a file, relative to the file that names it; ClusterError if it is missing or invalid."""
    path = Path(name) if named_in is None else from_folder_of(named_in, name)
    found: ProfileFile = read(ProfileFile, path)
    given = dict(vars(found))
    source = given.pop("source")
    return Profile(ReplicaCost(**given), source)


def model(name: str, named_in: Path) -> Architecture:
    """Return a model's shape: a name in :data:`PUBLISHED`, or a ``config.json`` or its folder, relative to the file."""
    path = from_folder_of(named_in, name)
    try:
        if (config := PUBLISHED.get(name)) is None:
            config = read_json(path if path.is_file() else find(str(path)) or find(name) or path)
        return Architecture.read(config)
    except OSError:
        raise ClusterError(
            f"{named_in}: no model {name}{nearest(name, PUBLISHED) or '.'} Choose {', '.join(PUBLISHED)}, or a "
            f"config.json; {path.absolute()} is not a file"
        ) from None
    except ValueError as error:
        raise ClusterError(
            f"{named_in}: model={name}: {error}; a file with measured profiles needs no model"
        ) from error


def gpu(name: str, where: str) -> roofline.GPU:
    """Return a GPU's data sheet; raises :class:`ClusterError` if it is unknown, at ``where``."""
    if name not in roofline.GPUS:
        raise ClusterError(
            f"{where}: no data sheet of {name}{nearest(name, roofline.GPUS) or '.'} Choose "
            f"{', '.join(roofline.GPUS)}, or use a file with a measured profile"
        )
    return roofline.GPUS[name]


def calculated(
    name: str, device: str, tp: int, dtype: str, factor: float, named_in: Path, where: str, **sizes: Any
) -> Profile:
    """Return the profile of a model on a GPU of the table; ``where``: place of the kind, for :class:`ClusterError`."""
    shape, sheet = model(name, named_in), gpu(device, f"{where}.gpu")
    if not 0 < factor < math.inf:
        raise ClusterError(f"{where}.factor must be above 0 and finite, not {factor}")
    try:
        cost = roofline.replica(shape, sheet, tp, dtype, **sizes).slowed(factor)
    except ValueError as error:
        raise ClusterError(f"{where}: {error}") from error
    return Profile(cost, described(Path(name).name, device, tp, dtype, factor))


def training_token(name: str, device: str, named_in: Path, where: str) -> float:
    """Return the seconds in which one GPU trains a token of a model; errors as :func:`calculated`."""
    return roofline.training_token(model(name, named_in), gpu(device, f"{where}.gpu"))


def of_run(path: str, devices: Iterable[str], tp: int, dtype: str) -> Profile | None:
    """Return the calculated profile of a run's replicas; ``None`` if its model (folder or hub id) or GPU is unknown.

    ``devices`` are names that may contain a GPU's. An unknown ``dtype`` counts as bfloat16.
    """
    file, device = find(path), roofline.gpu_named(" ".join(devices))
    if file is None or not device:
        return None
    dtype = dtype if dtype in roofline.DTYPES else "bfloat16"
    try:
        cost = roofline.replica(Architecture.read(read_json(file)), roofline.GPUS[device], tp, dtype)
    except (OSError, ValueError):  # another family
        return None
    return Profile(cost, described(Path(path).name, device, tp, dtype))


def described(model: str, gpu: str, tp: int, dtype: str, factor: float = 1.0) -> str:
    times = "" if factor == 1 else f" x {factor:g}"
    return f"roofline of {model}, {dtype}, on {tp} {gpu}{times}"
