"""Warnings of losses that the pipeline makes wrong or uneven. They only warn, since verl accepts these settings.

Stale tokens: verl's decoupled mode computes ``old_log_probs`` with the current policy, so that without correction a
token of an earlier policy is trained with ratio 1. ``rollout_is=token``, which the presets set, multiplies its loss by
min(pi_old / pi_rollout, ``rollout_is_threshold``): truncated importance sampling (IMPALA, arXiv:1802.01561, section 4).

Support: such a weight divides the actor's probability, over the whole vocabulary at ``rollout.temperature``, by the
rollout's. vLLM's ``processed_logprobs`` are of the distribution after top-p, top-k, min-p and penalties,
``raw_logprobs`` before the temperature. The presets set ``policy_logprobs`` (:mod:`verl_rhyme.engine.drawer`). Options
that an agent loop gives to single requests are not seen here.

Loss averages (``actor.loss_agg_mode``): some divide by the tokens of the step or by its longest response, so that the
weight of a token depends on the other responses of the step, whose lengths sorted batches change (docs/pipeline.md,
"The order and the gradient").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from verl_rhyme.checks.doctor import WARN, Check, problems
from verl_rhyme.config.presets import POLICY_LOGPROBS
from verl_rhyme.scheduling.rules import Rules

_ACTOR = "actor_rollout_ref.actor"
_CORRECTION = "algorithm.rollout_correction"
_ROLLOUT = "actor_rollout_ref.rollout"
_NORM = "seq-mean-token-sum-norm"


def warnings(config: Any, rules: Rules | None) -> Iterator[Check]:
    """Yield each problem of the loss of a run with these rules (``None`` without a pipeline), with its remedy."""
    correction = OmegaConf.select(config, _CORRECTION) or {}
    if _corrects(correction):
        yield from _other_support(config)
    if rules is None:
        return
    stale, sorts = rules.max_staleness, rules.take == "finished" and rules.batches > 1  # else trained as loaded
    average = OmegaConf.select(config, f"{_ACTOR}.loss_agg_mode")
    horizon = f"{_ACTOR}.loss_scale_factor={OmegaConf.select(config, 'data.max_response_length')}"
    yield from problems(
        "loss",
        (
            stale and not _corrects(correction),
            f"tokens are up to {stale} version{'s' if stale > 1 else ''} behind the policy, and without importance "
            f"weights ({_CORRECTION}.rollout_is=null) they are trained as if the current policy had sampled them",
            f"drop the override, or set {_CORRECTION}.rollout_is=token",
        ),
        (
            sorts and average == "token-mean",
            f"{_ACTOR}.loss_agg_mode=token-mean: tokens of short batches weigh more; in a simulated run, summed "
            f"gradients have cosine {'0.96 to 1' if stale else '0.81 to 0.90'} to those of equal weights "
            "(docs/pipeline.md)",
            f"set {_ACTOR}.loss_agg_mode={_NORM} and {horizon}",
        ),
        (
            sorts and average == _NORM and OmegaConf.select(config, f"{_ACTOR}.loss_scale_factor") is None,
            f"{_ACTOR}.loss_agg_mode={_NORM} without {_ACTOR}.loss_scale_factor: the loss of each micro-batch is "
            "divided by its longest response (docs/pipeline.md)",
            f"set {horizon}",
        ),
        status=WARN,
    )


#: vLLM raises temperatures between 0 and this one.
_LEAST_TEMPERATURE = 0.01


def _other_support(config: Any) -> list[Check]:
    def rollout(name: str, default: Any) -> Any:
        value = OmegaConf.select(config, f"{_ROLLOUT}.{name}")
        return default if value is None else value

    defaults = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    changed = [f"{name}={value}" for name in defaults if (value := rollout(name, defaults[name])) != defaults[name]]
    mode, temperature = str(rollout("logprobs_mode", "processed_logprobs")), rollout("temperature", 1.0)
    low = temperature < _LEAST_TEMPERATURE
    same = {POLICY_LOGPROBS: True, "processed_logprobs": not changed, "raw_logprobs": temperature == 1}.get(mode, False)
    return problems(
        "loss",
        (
            low,
            f"{_ROLLOUT}.temperature={temperature}: vLLM samples at {_LEAST_TEMPERATURE}, or greedily, and the "
            f"actor divides its logits by {temperature}, so that importance weights of an unmoved policy are not 1",
            f"set {_ROLLOUT}.temperature to at least {_LEAST_TEMPERATURE}",
        ),
        (
            not low and not same and rollout("calculate_log_probs", True),
            f"{_ROLLOUT}.logprobs_mode={mode} with {' and '.join(changed) or f'temperature={temperature}'}: importance "
            "weights divide the actor's probabilities by those of another distribution. Those of an unmoved policy are "
            "not 1 (0.86 on average at top_p=0.8, 0.83 at top_k=3, 12 tokens)",
            f"set {_ROLLOUT}.logprobs_mode={POLICY_LOGPROBS}, which needs rhyme's sampler (a preset with drafting or "
            "the pipeline)",
        ),
        status=WARN,
    )


def _corrects(correction: Any) -> bool:
    return any(correction.get(name) for name in ("rollout_is", "rollout_rs", "bypass_mode"))
