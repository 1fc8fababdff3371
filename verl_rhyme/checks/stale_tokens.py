"""How tokens of earlier policies are corrected for: what presets set of verl's ``rollout_correction``, and what holds.

verl's decoupled mode computes ``old_log_probs`` with the policy that is trained, so that without correction a token
which an earlier policy sampled is trained with ratio 1. With ``rollout_is=token`` its loss has the weight
min(pi_old / pi_rollout, ``rollout_is_threshold``), each token by the policy that sampled it: truncated importance
sampling (IMPALA, arXiv:1802.01561, section 4; Yao et al., 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training"). It also corrects what engine and actor compute differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.config import RhymeConfig
from verl_rhyme.scheduling.rules import of_config

_CORRECTION = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Correction:
    """What is in force in a run that trains tokens of earlier policies.

    Attributes:
        corrected: These tokens are weighted, clipped or rejected by how far the policy has moved.
        detail: In one line.
        remedy: What to set where they are not.
    """

    corrected: bool
    detail: str
    remedy: str = ""


def correction(config: Any, rhyme: RhymeConfig | None) -> Correction | None:
    """What corrects for stale tokens.

    Args:
        config: verl's whole config; ``algorithm.rollout_correction`` and the trainer mode are read.
        rhyme: Our tree in it; ``None`` without rhyme.

    Returns:
        ``None`` where no rules of ours let such tokens be trained.

    Raises:
        ValueError: Options exclude each other (:func:`~verl_rhyme.scheduling.rules.of_config`).
    """
    rules = of_config(config, rhyme)
    if rules is None or not rules.max_staleness:
        return None
    stale = rules.max_staleness
    found = OmegaConf.select(config, _CORRECTION) or {}
    level, threshold, rejection = (found.get(k) for k in ("rollout_is", "rollout_is_threshold", "rollout_rs"))
    head = f"tokens are at most {stale} version{'s' if stale > 1 else ''} old"
    if found.get("bypass_mode"):
        return Correction(
            True, f"{head}; {_CORRECTION}.bypass_mode=true: the loss's own ratio is taken to their policy"
        )
    if level:
        kind = "IcePop" if "_" in str(threshold) else "truncated importance sampling"
        told = f"{head}; {level}-level {kind}, threshold {threshold} ({_CORRECTION}.rollout_is={level})"
        return Correction(True, told + (f", rollout_rs={rejection}" if rejection else ""))
    told = f"{head}, with no importance weights ({_CORRECTION}.rollout_is=null)"
    if rejection:
        return Correction(True, f"{told}; rollout_rs={rejection} rejects those that the policy has moved away from")
    remedy = f"drop the override, or set {_CORRECTION}.rollout_is=token"
    return Correction(False, f"{told}: they are trained as if the current policy had sampled them", remedy)
