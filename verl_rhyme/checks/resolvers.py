"""OmegaConf resolvers that presets and users' YAML may use; the plugin registers them in every process.

``${rhyme.if_separate:A,B}``
    A where ``trainer.v1.trainer_mode=separate_async``, else B.
``${rhyme.preset:}``
    Name of the run (:mod:`verl_rhyme.config.run_name`).
``${rhyme.quotient:A,B}``
    A divided by B, rounded down.
``${rhyme.rollout_is:}``
    ``token`` where the run trains stale tokens, else ``null``.
``${rhyme.logprobs_mode:}``
    ``policy_logprobs`` where rhyme's sampler draws the tokens, else verl's ``processed_logprobs``.

The resolvers import the config late, because few processes resolve one.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf


def register() -> None:
    """Let YAML of this process interpolate ``${rhyme.NAME:...}``."""
    for resolver in (if_separate, logprobs_mode, preset, quotient, rollout_is):
        OmegaConf.register_new_resolver(f"rhyme.{resolver.__name__}", resolver, replace=True)


def if_separate(separate: Any, colocated: Any, *, _root_: Any) -> Any:
    return separate if _root_.trainer.v1.trainer_mode == "separate_async" else colocated


def preset(*, _root_: Any) -> str:
    from verl_rhyme.config import config_tree, run_name

    try:
        return run_name.run_name(config_tree.from_verl(_root_))
    except ValueError:  # start-up and preflight report it
        return "invalid"


def quotient(whole: Any, part: Any) -> int:
    return int(whole) // max(1, int(part))


def logprobs_mode(*, _root_: Any) -> str:
    from verl_rhyme.config import config_tree, presets

    try:
        rhyme = config_tree.from_verl(_root_)
    except ValueError:  # start-up and preflight report it
        return "processed_logprobs"
    return presets.POLICY_LOGPROBS if rhyme is not None and rhyme.draws else "processed_logprobs"


def rollout_is(*, _root_: Any) -> str | None:
    from verl_rhyme.checks.rules import of_config
    from verl_rhyme.config import config_tree

    try:
        rules = of_config(_root_, config_tree.from_verl(_root_))
    except ValueError:
        return None
    return "token" if rules is not None and rules.max_staleness else None
