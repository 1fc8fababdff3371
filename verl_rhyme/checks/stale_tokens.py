"""Check that verl's ``rollout_correction``, which the presets set, corrects stale tokens.

verl's decoupled mode computes ``old_log_probs`` with the current policy. Without correction, a token of an earlier
policy is therefore trained with ratio 1. ``rollout_is=token`` multiplies the token's loss by
min(pi_old / pi_rollout, ``rollout_is_threshold``), where pi_rollout is the policy that sampled the token: truncated
importance sampling (IMPALA, arXiv:1802.01561, section 4; Yao et al., 2025, "Your Efficient RL Framework Secretly Brings
You Off-Policy RL Training"). It also corrects numerical differences between engine and actor.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.config import RhymeConfig
from verl_rhyme.scheduling.rules import of_config

_CORRECTION = "algorithm.rollout_correction"
REMEDY = f"drop the override, or set {_CORRECTION}.rollout_is=token"


def uncorrected(config: Any, rhyme: RhymeConfig | None) -> str | None:
    """Return a warning if stale tokens are trained and an override disables all corrections, else ``None``.

    Args:
        config: verl's whole config; ``algorithm.rollout_correction`` and the trainer mode are read.
        rhyme: Rhyme tree of the config; ``None`` without rhyme.

    Raises:
        ValueError: Options exclude each other (:func:`~verl_rhyme.scheduling.rules.of_config`).
    """
    rules, correction = of_config(config, rhyme), OmegaConf.select(config, _CORRECTION) or {}
    if rules is None or not rules.max_staleness:
        return None
    if any(correction.get(name) for name in ("rollout_is", "rollout_rs", "bypass_mode")):
        return None
    versions = f"{rules.max_staleness} version{'s' if rules.max_staleness > 1 else ''}"
    return (
        f"tokens are up to {versions} behind the policy, and without importance weights "
        f"({_CORRECTION}.rollout_is=null) they are trained as if the current policy had sampled them"
    )
