"""Whether tokens of earlier policies are corrected for, as presets have it by verl's ``rollout_correction``.

verl's decoupled mode computes ``old_log_probs`` with the policy that is trained, so that without correction a token
which an earlier policy sampled is trained with ratio 1. With ``rollout_is=token`` its loss has the weight
min(pi_old / pi_rollout, ``rollout_is_threshold``), each token by the policy that sampled it: truncated importance
sampling (IMPALA, arXiv:1802.01561, section 4; Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training"). It also corrects what engine and actor compute differently.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.config import RhymeConfig
from verl_rhyme.scheduling.rules import of_config

_CORRECTION = "algorithm.rollout_correction"
REMEDY = f"drop the override, or set {_CORRECTION}.rollout_is=token"


def uncorrected(config: Any, rhyme: RhymeConfig | None) -> str | None:
    """What is to be told where stale tokens are trained and an override leaves nothing that corrects for them.

    Args:
        config: verl's whole config; ``algorithm.rollout_correction`` and the trainer mode are read.
        rhyme: Our tree in it; ``None`` without rhyme.

    Raises:
        ValueError: Options exclude each other (:func:`~verl_rhyme.scheduling.rules.of_config`).
    """
    rules, found = of_config(config, rhyme), OmegaConf.select(config, _CORRECTION) or {}
    if rules is None or not rules.max_staleness:
        return None
    if any(found.get(name) for name in ("rollout_is", "rollout_rs", "bypass_mode")):
        return None
    versions = f"{rules.max_staleness} version{'s' if rules.max_staleness > 1 else ''}"
    return (
        f"tokens are at most {versions} old, and without importance weights ({_CORRECTION}.rollout_is=null) they are "
        "trained as if the current policy had sampled them"
    )
