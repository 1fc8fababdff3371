"""The router file: ``actor_rollout_ref.rollout.router_config_path`` names it, and verl's ``LLMServerManager`` makes its
router from it, in the trainer's process, once its engines run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

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


def check_own(config: Any) -> None:
    """Raise ``ConfigError`` if the user's own router does not exist or lacks methods of verl's ``RequestLoadBalancer``:
    verl would fail once all engines run."""
    option = "actor_rollout_ref.rollout.router_config_path"
    file = OmegaConf.select(config, option)
    if not file:
        return
    from verl.utils.import_utils import load_class_from_fqn, resolve_config_path
    from verl.workers.rollout.router import RequestLoadBalancer

    path = Path(resolve_config_path(str(file)))
    if not path.is_file():
        raise ConfigError(f"{option}={file}: file {path} does not exist; fix the path, or drop the option")
    name = OmegaConf.select(OmegaConf.load(path), "router_class")
    if not name:
        raise ConfigError(f"{option}={file} names no router_class: add router_class: module.Class")
    try:
        router_class = load_class_from_fqn(name)
    except Exception as error:
        raise ConfigError(f"{option}={file}: router_class {name} cannot be imported: {error}") from error
    below = getattr(getattr(router_class, "__ray_metadata__", None), "modified_class", router_class)
    needed = [method for method in vars(RequestLoadBalancer) if not method.startswith("_")]
    if lacks := [method for method in needed if not hasattr(below, method)]:
        raise ConfigError(
            f"{option}={file}: {name} lacks {', '.join(sorted(lacks))}: derive it from "
            "verl.workers.rollout.router.GlobalRequestLoadBalancer, or add the missing methods"
        )


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
