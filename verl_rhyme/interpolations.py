"""What YAML may interpolate where verl-rhyme is installed: presets, the recipes and a user's own.

``${rhyme.if_separate:A,B}``
    A where ``trainer.v1.trainer_mode=separate_async``, else B.
``${rhyme.preset:}``
    What the run is called (:mod:`verl_rhyme.arms`).
``${rhyme.quotient:A,B}``
    A whole number of times that B is in A.
``${rhyme.rollout_is:}``
    The level of importance sampling for the rules in force (:mod:`verl_rhyme.stale_tokens`).
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from verl_rhyme import config_tree, stale_tokens
from verl_rhyme.arms import arm_name


def register() -> None:
    """In this process; hydra's search path plugin and verl's plugin call it."""
    stale_tokens.register()
    OmegaConf.register_new_resolver("rhyme.if_separate", _if_separate, replace=True)
    OmegaConf.register_new_resolver("rhyme.preset", _preset, replace=True)
    OmegaConf.register_new_resolver("rhyme.quotient", lambda whole, part: int(whole) // max(1, int(part)), replace=True)


def _if_separate(separate: Any, colocated: Any, *, _root_: Any) -> Any:
    return separate if _root_.trainer.v1.trainer_mode == "separate_async" else colocated


def _preset(*, _root_: Any) -> str:
    try:
        return arm_name(config_tree.from_verl(_root_))
    except ValueError:  # start-up and preflight report it
        return "invalid"
