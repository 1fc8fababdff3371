"""How verl's trainers come to our router: the file that ``actor_rollout_ref.rollout.router_config_path`` names.

Each of verl's ``LLMServerManager`` makes its router from that file, in the trainer's process, when its engines stand.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf, open_dict

from verl_rhyme.config import CONFIG_PATH, ConfigError, PlacementConfig
from verl_rhyme.placement import Placement
from verl_rhyme.planning import profile
from verl_rhyme.planning.cost import TYPICAL, ReplicaCost
from verl_rhyme.planning.typed_yaml import ClusterError

#: In the run's checkpoint folder.
NAME = "router.yaml"
#: What stands in it; the class's module imports verl's engines, and this one is read before Ray starts.
_CONTENT = "router_class: verl_rhyme.router.router.PlacementRouter\n"


def check(placement: PlacementConfig) -> None:
    """Refuse options that the policy itself refuses: it is made later, in an actor, once all engines stand.

    Raises:
        ConfigError: Said by the policy.
    """
    if placement.policy is None:
        return
    cost(placement)
    try:
        Placement(placement.policy, placement.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{CONFIG_PATH}.placement.options={placement.options}: {error}") from error


def check_own(config: Any) -> None:
    """Refuse a router of the user's own that verl would fail with when all engines stand.

    Args:
        config: verl's whole config.

    Raises:
        ConfigError: Its file or its class is not there, or the class lacks methods of verl's ``RequestLoadBalancer``.
    """
    option = "actor_rollout_ref.rollout.router_config_path"
    file = OmegaConf.select(config, option)
    if not file:
        return
    from verl.utils.import_utils import load_class_from_fqn, resolve_config_path
    from verl.workers.rollout.router import RequestLoadBalancer

    path = Path(resolve_config_path(str(file)))
    if not path.is_file():
        raise ConfigError(f"{option}={file}: no file {path}; mend the path, or drop the option for verl's router")
    name = OmegaConf.select(OmegaConf.load(path), "router_class")
    if not name:
        raise ConfigError(f"{option}={file} names no router_class: add router_class: module.Class")
    try:
        found = load_class_from_fqn(name)
    except Exception as error:
        raise ConfigError(f"{option}={file}: router_class {name} cannot be imported: {error}") from error
    below = getattr(getattr(found, "__ray_metadata__", None), "modified_class", found)
    needed = [method for method in vars(RequestLoadBalancer) if not method.startswith("_")]
    if lacks := [method for method in needed if not hasattr(below, method)]:
        raise ConfigError(
            f"{option}={file}: {name} lacks {', '.join(sorted(lacks))}: derive it from "
            "verl.workers.rollout.router.GlobalRequestLoadBalancer, or add what is missing"
        )


def cost(placement: PlacementConfig) -> ReplicaCost:
    """What a replica's work costs (:attr:`PlacementConfig.profile`).

    Raises:
        ConfigError: There is no such profile, or it says what cannot be.
    """
    if placement.profile is None:
        return TYPICAL
    try:
        return profile.profile(placement.profile)[0]
    except ClusterError as error:
        raise ConfigError(f"{CONFIG_PATH}.placement.profile: {error}") from error


def use(config: Any, placement: PlacementConfig) -> Path | None:
    """Let every router of a run be ours, which the coordinator's placement needs; to be called before verl's trainer
    makes its engines.

    Args:
        config: verl's whole config; ``actor_rollout_ref.rollout.router_config_path`` is set in it.
        placement: Its ``policy`` is ``None`` where verl's router shall stay: nothing is changed then.

    Returns:
        The file, in ``trainer.default_local_dir``; written anew at every start.

    Raises:
        OSError: It cannot be written.
    """
    if placement.policy is None:
        return None
    file = Path(str(config.trainer.default_local_dir)).expanduser().absolute() / NAME
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}.tmp")
    new.write_text(_CONTENT)
    new.replace(file)
    with open_dict(config):
        config.actor_rollout_ref.rollout.router_config_path = str(file)
    return file
