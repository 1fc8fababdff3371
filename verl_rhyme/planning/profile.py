"""What one kind of replica costs, from a YAML file: a name in ``profiles/``, or a path (``verl-rhyme profile``)."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from omegaconf import MISSING

from verl_rhyme.planning.cost import ReplicaCost, StepCost
from verl_rhyme.planning.typed_yaml import ClusterError, from_folder_of, read

PROFILES = Path(__file__).parent / "profiles"


@dataclass
class StepFile:
    """Of a profile: :class:`~verl_rhyme.planning.cost.StepCost`."""

    base: float = MISSING
    row: float = 0.0
    cached: float = 0.0
    draft: float = 0.0
    drafting: float = 0.0


@dataclass
class ProfileFile:
    """One kind of replica: :class:`~verl_rhyme.planning.cost.ReplicaCost`, where its figures are from, and of a model
    of how many parameters, where that is known."""

    source: str = MISSING
    parameters: float | None = None
    step: StepFile = field(default_factory=StepFile)
    prefill: float = 0.0
    slots: int = 256
    room: float = math.inf
    gpus: int = 1


class Profile(NamedTuple):
    """A kind of replica, where its figures are from, of how many parameters its model is (``None``: not known), and
    what it was named as."""

    cost: ReplicaCost
    source: str
    parameters: float | None
    name: str


def profile(name: str, beside: Path | None = None) -> Profile:
    """A kind of replica.

    Args:
        name: Of a file in :data:`PROFILES` without its ending, or a path.
        beside: The file that names it, from whose folder paths count; ``None``: from where we are.

    Raises:
        ClusterError: There is none, or it says what cannot be.
    """
    known = sorted(file.stem for file in PROFILES.glob("*.yaml"))
    path = (
        PROFILES / f"{name}.yaml" if name in known else Path(name) if beside is None else from_folder_of(beside, name)
    )
    if not path.is_file():
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ClusterError(
            ("" if beside is None else f"{beside}: ")
            + f"no profile {name}: {hint}there are {', '.join(known)}; a YAML's path counts from "
            + ("the current folder" if beside is None else f"the folder of {beside.name}")
            + f", and {path} is no file"
        )
    found: ProfileFile = read(ProfileFile, path)
    try:
        step = StepCost(**vars(found.step))
        cost = ReplicaCost(step, found.prefill, found.slots, found.room, found.gpus)
        return Profile(cost, found.source, found.parameters, name)
    except ValueError as error:
        raise ClusterError(f"{path}: {error}") from error
