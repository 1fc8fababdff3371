"""OmegaConf resolvers that presets and users' YAML may use; the plugin registers them.

``${rhyme.if_separate:A,B}``
    A where ``trainer.v1.trainer_mode=separate_async``, else B.
``${rhyme.preset:}``
    Name of the run (:mod:`verl_rhyme.config.run_name`).
``${rhyme.quotient:A,B}``
    A divided by B, rounded down.
``${rhyme.rollout_is:}``
    ``token`` where the run trains stale tokens, else ``null``.
"""

from __future__ import annotations

from typing import Any

from verl_rhyme.config import config_tree
from verl_rhyme.config.run_name import run_name
from verl_rhyme.scheduling.rules import of_config


def if_separate(separate: Any, colocated: Any, *, root: Any) -> Any:
    return separate if root.trainer.v1.trainer_mode == "separate_async" else colocated


def preset(*, root: Any) -> str:
    try:
        return run_name(config_tree.from_verl(root))
    except ValueError:  # start-up and preflight report it
        return "invalid"


def quotient(whole: Any, part: Any, *, root: Any) -> int:
    return int(whole) // max(1, int(part))


def rollout_is(*, root: Any) -> str | None:
    try:
        rules = of_config(root, config_tree.from_verl(root))
    except ValueError:
        return None
    return "token" if rules is not None and rules.max_staleness else None
