"""Cost profile of one kind of replica, from YAML: a name in ``profiles/``, or a path (``verl-rhyme profile``)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from omegaconf import MISSING

from verl_rhyme.config.checks import nearest
from verl_rhyme.planning.cost import ReplicaCost, StepCost
from verl_rhyme.planning.typed_yaml import ClusterError, from_folder_of, read

PROFILES = Path(__file__).parent / "profiles"


@dataclass
class StepFile:
    """The section ``step``: :class:`~verl_rhyme.planning.cost.StepCost`."""

    base: float = MISSING
    row: float = 0.0
    cached: float = 0.0
    draft: float = 0.0
    drafting: float = 0.0


@dataclass
class ProfileFile:
    """:class:`~verl_rhyme.planning.cost.ReplicaCost`, the source of its figures, the model's parameters if known."""

    source: str = MISSING
    parameters: float | None = None
    step: StepFile = field(default_factory=StepFile)
    prefill: float = 0.0
    slots: int = 256
    room: float = math.inf
    gpus: int = 1


class Profile(NamedTuple):
    """A kind of replica, the source of its figures, its model's parameters (``None``: unknown), and its given name."""

    cost: ReplicaCost
    source: str
    parameters: float | None
    name: str


def profile(name: str, named_in: Path | None = None) -> Profile:
    """Return the profile of a kind of replica.

    Args:
        name: Name of a file in :data:`PROFILES` without its extension, or a path.
        named_in: File that names it, whose folder paths are relative to; ``None``: the current folder.

    Raises:
        ClusterError: The profile is missing or invalid.
    """
    known = sorted(file.stem for file in PROFILES.glob("*.yaml"))
    if name in known:
        path = PROFILES / f"{name}.yaml"
    else:
        path = Path(name) if named_in is None else from_folder_of(named_in, name)
    if not path.is_file():
        where, folder = ("", "current folder") if named_in is None else (f"{named_in}: ", f"folder of {named_in.name}")
        gpus = {*name.split("-")}  # a profile of another GPU is no substitute
        near = nearest(name, [each for each in known if each.split("-")[-2] in gpus])
        raise ClusterError(
            f"{where}no profile {name}{near or '.'} Choose {', '.join(known)}, or a YAML path "
            f"relative to the {folder}; {path} is not a file"
        )
    found: ProfileFile = read(ProfileFile, path)
    try:
        step = StepCost(**vars(found.step))
        cost = ReplicaCost(step, found.prefill, found.slots, found.room, found.gpus)
        return Profile(cost, found.source, found.parameters, name)
    except ValueError as error:
        raise ClusterError(f"{path}: {error}") from error
