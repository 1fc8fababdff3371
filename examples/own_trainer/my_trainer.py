"""Somebody's own trainer, with rhyme put under it: one more base class.

``trainer.v1.trainer_mode=my_async`` after ``VERL_USE_EXTERNAL_MODULES=examples.own_trainer.my_trainer``.
verl gives every mode but ``sync`` its asynchronous semantics, so derive from an asynchronous trainer.
"""

from typing import Any

from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, register_trainer

from verl_rhyme.trainer.base import RhymeTrainerMixin


@register_trainer("my_async")
class MyTrainer(RhymeTrainerMixin, PPOTrainerColocateAsync):
    """Logs the share of full-length responses, to have something of its own."""

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        limit = self.config.data.max_response_length
        metrics["mine/full_length"] = sum(tag["response_len"] >= limit for tag in batch.tags) / len(batch.tags)
