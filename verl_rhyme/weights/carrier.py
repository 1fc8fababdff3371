"""What a trainer asks of a backend of weight transfer; :mod:`verl_rhyme.config.backends` lists the implementations."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from verl.checkpoint_engine import CheckpointEngineManager

from verl_rhyme.config import WeightsConfig
from verl_rhyme.config.backends import backend


class Carrier(CheckpointEngineManager):
    """Carrier of weights from the actor to replicas; it replaces verl's manager.

    It ensures that a replica serves only with the weights that the actor has sent: :mod:`verl_rhyme.weights.samples`.
    ``update_weights`` sends them to :attr:`replicas`, as a new version, and returns metrics; it raises WeightsError if
    a replica holds other weights, RayError if one died. The trainer calls a carrier from one thread.
    """

    replicas: list[Any]  # those that get new versions
    #: Whether ``update_weights`` waits until all replicas have loaded the version, and whether a replica finishes its
    #: requests before it loads. The trainer changes them only if the backend is ``one_by_one``.
    waits, patient = True, False

    def deliver(self, replicas: Iterable[Any], version: int) -> None:
        """Give the newest version to these replicas, new ones for example; wait until they have loaded it. Raises
        ReplicaDied if the run cannot go on after a failure, RayError if it can with another replica.
        """
        raise NotImplementedError

    def check(self) -> int:
        """Count the replicas that have not loaded the newest version, and retry what failed. Does not block."""
        return 0

    def finish_deliveries(self) -> None:
        """Wait until all replicas have loaded the newest version."""

    def release(self, replica: Any) -> None:
        """Let go of a replica about to rest, which is in :attr:`replicas` no more."""

    def close(self) -> None:
        """Remove all files: the run ends."""


def carrier(theirs: Any, options: WeightsConfig, rollout: Any) -> Carrier:
    """Return the carrier that replaces verl's checkpoint manager; ``rollout`` is verl's config of the engines."""
    module, _, name = backend(theirs.backend).carrier.partition(":")
    make = getattr(importlib.import_module(f"verl_rhyme.weights.{module}"), name)
    made: Carrier = make(theirs.config, theirs.actor_wg, theirs.replicas, options, rollout)
    return made
