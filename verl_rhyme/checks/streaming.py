"""Options with which the gradients of streamed parts wait for the whole batch; start-up and trainer report them."""

from __future__ import annotations

from typing import Any

#: ``algorithm.adv_estimator`` that compare only trajectories of the same prompt.
GROUP_ESTIMATORS = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo")
#: ``policy_loss.loss_mode`` that are sums over tokens, divided as ``loss_agg_mode`` defines. Not these: ``sapo`` and
#: ``geo_mean`` always divide by sequences; ``clip_cov`` and ``kl_cov`` rank the tokens of a micro-batch.
STREAMED_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "gpg", "dro", "cispo")


def find_unsupported_option(config: Any) -> str | None:
    """Return the option for which gradients wait for the whole batch; ``None``: they are streamed."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    loss = actor.policy_loss.get("loss_mode", "vanilla")
    correction = algorithm.get("rollout_correction") or {}
    adaptive = algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive"
    for waits, why in (
        (algorithm.adv_estimator not in GROUP_ESTIMATORS, f"algorithm.adv_estimator={algorithm.adv_estimator}"),
        (adaptive, "algorithm.kl_ctrl.type=adaptive"),
        (correction.get("rollout_is_batch_normalize"), "rollout_correction.rollout_is_batch_normalize=true"),
        (actor.ppo_mini_batch_size != config.data.train_batch_size, "several mini-batches in a training step"),
        (actor.ppo_epochs != 1, f"actor.ppo_epochs={actor.ppo_epochs}"),
        (actor.shuffle, "actor.shuffle=true"),
        (config.trainer.critic_warmup > 0, f"trainer.critic_warmup={config.trainer.critic_warmup}"),
        (config.critic.enable, "critic.enable=true"),  # verl trains it on whole batches
        # verl then divides by the width of a micro-batch
        (
            actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None,
            "actor.loss_agg_mode=seq-mean-token-sum-norm without actor.loss_scale_factor",
        ),
        (loss not in STREAMED_LOSSES, f"actor.policy_loss.loss_mode={loss}"),
        ((config.get("distillation") or {}).get("enabled"), "distillation"),
    ):
        if waits:
            return why
    return None
