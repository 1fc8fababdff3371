"""Code of the user that a run loads: it may register names that verl does not know, so that those only warn."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.doctor import FAIL, WARN, Check
from verl_rhyme.checks.preflight.compose import MAIN, verl_folder
from verl_rhyme.config.checks import nearest
from verl_rhyme.config.presets import MANAGER

#: Keys of verl's config with code of the user.
KEYS = (
    "actor_rollout_ref.model.external_lib",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module",
    MANAGER,
    "data.custom_cls.path",
    "trainer.v1.sampler.custom_sampler.path",
)

#: Further keys with code of the user that gets verl's config, but registers no names.
_READERS = (
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "actor_rollout_ref.rollout.agent.custom_async_server.path",
    "reward.reward_manager.module.path",
)

#: Bases of verl's trainer before V1, and of the Ray actors that run it.
_OLD_TRAINERS = {("verl.trainer.ppo.ray_trainer", "RayPPOTrainer"), ("verl.trainer.main_ppo_v0", "BaseTaskRunner")}

#: Whether this process runs a main of the user's own.
own_main = False


def unknown(name: str, key: str, value: str, known: tuple[str, ...], config: Any) -> Check:
    """Return the finding ``name`` of a value not in ``known``: a warning if code of the user may register it."""
    detail = f"{key}={value} is not one of {', '.join(known)}{nearest(value, known)}"
    if found := _sources(config):
        return Check(name, WARN, detail, f"set one of them, or make sure that {' or '.join(found)} registers it")
    return Check(name, FAIL, detail, "set one of them, or name a module that registers it in VERL_USE_EXTERNAL_MODULES")


def is_verls(main: Any) -> bool:
    try:
        return Path(inspect.getfile(inspect.unwrap(main))).is_relative_to(verl_folder())
    except TypeError:  # an object
        return False


def reads_config(config: Any) -> bool:
    """Whether code of the user gets verl's config, and may read keys that verl does not."""
    return bool(_sources(config, KEYS + _READERS))


def old_trainer(main: Any) -> str | None:
    """Return the class or the main of verl by which a command trains without verl's V1 trainer; ``None`` if none shows.

    Recipes for verl's first trainer import their class of it in the module of their main, some as a Ray actor.
    """
    function = inspect.unwrap(main)
    if is_verls(main) and Path(inspect.getfile(function)) != verl_folder() / MAIN:
        return f"{function.__module__}.{function.__name__}"
    for each in getattr(function, "__globals__", {}).values():
        actor = getattr(each, "__dict__", {}).get("__ray_metadata__")
        for base in inspect.getmro(actor.modified_class if actor else each) if actor or isinstance(each, type) else ():
            if (base.__module__, base.__name__) in _OLD_TRAINERS:
                return str(actor.class_name if actor else each.__name__)
    return None


def _sources(config: Any, keys: tuple[str, ...] = KEYS) -> list[str]:
    found = ["your own main"] if own_main else []
    if modules := os.environ.get("VERL_USE_EXTERNAL_MODULES"):
        found.append(f"VERL_USE_EXTERNAL_MODULES={modules}")
    chosen = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    for entry in importlib.metadata.entry_points(group="verl.plugins"):
        if entry.name != "verl_rhyme" and (chosen == "auto" or entry.name in chosen.split(",")):
            found.append(f"the plugin {entry.name}")
    for key in keys:
        value = str(OmegaConf.select(config, key) or "")
        if value and not value.startswith(("verl.", "verl_rhyme.")):
            found.append(f"{key}={value}")
    return found
