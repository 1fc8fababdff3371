"""The router file: ``actor_rollout_ref.rollout.router_config_path`` names it, and verl's ``LLMServerManager`` makes its
router from it, in the trainer's process, once its engines run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import open_dict

from verl_rhyme.config import CONFIG_PATH, ConfigError, PlacementConfig
from verl_rhyme.placement import Placement
from verl_rhyme.planning import profile
from verl_rhyme.planning.profile import Profile
from verl_rhyme.planning.typed_yaml import ClusterError

#: Names the class of the router. This module cannot: it is imported before Ray starts, without verl's engines.
FILE = Path(__file__).with_name("router.yaml")


def check(placement: PlacementConfig) -> None:
    """Raise ``ConfigError`` if the policy rejects its options, or the profile does not exist or is invalid: the policy
    is made later, in an actor, once all engines run."""
    if placement.policy is None:
        return
    measured(placement)
    try:
        Placement(placement.policy, placement.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{CONFIG_PATH}.placement.options={placement.options}: {error}") from error


def measured(placement: PlacementConfig) -> Profile | None:
    """Return the measured profile of a replica (:attr:`PlacementConfig.profile`), if there is one."""
    if placement.profile is None:
        return None
    try:
        return profile.measured(placement.profile)
    except ClusterError as error:
        raise ConfigError(f"{CONFIG_PATH}.placement.profile: {error}") from error


def use(config: Any, placement: PlacementConfig) -> None:
    """Make every router of a run a :class:`~verl_rhyme.router.router.PlacementRouter`, if placement has a policy. Call
    it before verl's trainer makes its engines."""
    if placement.policy is not None:
        with open_dict(config):
            config.actor_rollout_ref.rollout.router_config_path = str(FILE)
