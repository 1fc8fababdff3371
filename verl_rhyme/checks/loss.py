"""Warnings of losses that the pipeline makes wrong or uneven. They only warn, since verl accepts these settings.

Stale tokens: verl's decoupled mode computes ``old_log_probs`` with the current policy. Without correction, a token of
an earlier policy is therefore trained with ratio 1. ``rollout_is=token``, which the presets set, multiplies the token's
loss by min(pi_old / pi_rollout, ``rollout_is_threshold``), where pi_rollout is the policy that sampled the token:
truncated importance sampling (IMPALA, arXiv:1802.01561, section 4; Yao et al., 2025, "Your Efficient RL Framework
Secretly Brings You Off-Policy RL Training"). It also corrects numerical differences between engine and actor.

Loss averages: verl averages the loss of an optimizer step in one of several ways (``actor.loss_agg_mode``; ``agg_loss``
in its ``trainer/ppo/core_algos.py``). Some divide by the tokens of the step or by its longest response, so that the
weight of a token depends on the other responses of the step. That hardly matters for batches of mixed lengths, but
sorted batches differ in length (docs/pipeline.md, "The order and the gradient"). An average over the number of
responses, which verl takes from the config, gives a token the same weight in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.combinations import Refusal
from verl_rhyme.config import CONFIG_PATH
from verl_rhyme.scheduling.rules import Rules

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"


def warnings(config: Any, rules: Rules | None) -> Iterator[Refusal]:
    """Yield each problem of the loss of a run with these rules (``None`` without a pipeline), with its remedy."""
    if rules is None:
        return
    if rules.max_staleness and not _corrects(OmegaConf.select(config, _CORRECTION) or {}):
        versions = f"{rules.max_staleness} version{'s' if rules.max_staleness > 1 else ''}"
        yield Refusal(
            f"tokens are up to {versions} behind the policy, and without importance weights "
            f"({_CORRECTION}.rollout_is=null) they are trained as if the current policy had sampled them",
            f"drop the override, or set {_CORRECTION}.rollout_is=token",
        )
    if rules.take != "finished" or rules.batches <= 1:  # batches are trained as they were loaded
        return
    average = OmegaConf.select(config, f"{_ACTOR}.loss_agg_mode")
    horizon = f"{_ACTOR}.loss_scale_factor={OmegaConf.select(config, 'data.max_response_length')}"
    if average == "token-mean":
        yield Refusal(
            f"{_ACTOR}.loss_agg_mode=token-mean with {CONFIG_PATH}.scheduling.take=finished: tokens of short responses "
            "weigh more, since the loss of a batch of short responses is divided by fewer tokens",
            f"set {_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm and {horizon}: all tokens then weigh the same",
        )
    if average == "seq-mean-token-sum-norm" and OmegaConf.select(config, f"{_ACTOR}.loss_scale_factor") is None:
        yield Refusal(
            f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm without {_ACTOR}.loss_scale_factor: the loss of each "
            "micro-batch is divided by its longest response, which varies between sorted micro-batches",
            f"set {horizon}",
        )


def _corrects(correction: Any) -> bool:
    return any(correction.get(name) for name in ("rollout_is", "rollout_rs", "bypass_mode"))
