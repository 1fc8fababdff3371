"""What YAML may interpolate where verl-rhyme is installed: presets, the recipes and a user's own.

``${rhyme.if_separate:A,B}``
    A where ``trainer.v1.trainer_mode=separate_async``, else B.
``${rhyme.preset:}``
    What the run is called (:mod:`verl_rhyme.config.arms`).
``${rhyme.quotient:A,B}``
    A whole number of times that B is in A.
``${rhyme.rollout_is:}``
    ``token`` where the rules in force let tokens of earlier policies be trained, else ``null``.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

# The resolvers import what they need: verl's plugin registers them in each process, most of which ask for none.


def register() -> None:
    """In this process; hydra's search path plugin, verl's plugin and who reads a run's config call it."""
    OmegaConf.register_new_resolver("rhyme.if_separate", _if_separate, replace=True)
    OmegaConf.register_new_resolver("rhyme.preset", _preset, replace=True)
    OmegaConf.register_new_resolver("rhyme.quotient", _quotient, replace=True)
    OmegaConf.register_new_resolver("rhyme.rollout_is", _rollout_is, replace=True)


def _if_separate(separate: Any, colocated: Any, *, _root_: Any) -> Any:
    return separate if _root_.trainer.v1.trainer_mode == "separate_async" else colocated


def _preset(*, _root_: Any) -> str:
    from verl_rhyme.config import config_tree
    from verl_rhyme.config.arms import arm_name

    try:
        return arm_name(config_tree.from_verl(_root_))
    except ValueError:  # start-up and preflight report it
        return "invalid"


def _quotient(whole: Any, part: Any) -> int:
    return int(whole) // max(1, int(part))


def _rollout_is(*, _root_: Any) -> str | None:
    from verl_rhyme.config import config_tree
    from verl_rhyme.scheduling.rules import of_config

    try:
        rules = of_config(_root_, config_tree.from_verl(_root_))
    except ValueError:
        return None
    return "token" if rules is not None and rules.max_staleness else None
