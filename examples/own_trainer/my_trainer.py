"""Custom trainer and worker on top of rhyme: one more base class.

Set ``trainer.v1.trainer_mode=my_async`` and
``VERL_USE_EXTERNAL_MODULES=verl_rhyme.plugin,examples.own_trainer.my_trainer`` (see README.md in this folder).
verl gives every mode except ``sync`` asynchronous semantics, so derive from an asynchronous trainer. Without
``+rhyme=...``, or with ``rhyme.enable=false``, it is the same trainer without rhyme: the mixin's hooks do nothing.
"""

from typing import Any

import ray
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, register_trainer

from examples.own_trainer.my_worker import MyWorker
from verl_rhyme.trainer.base import RhymeTrainerMixin


@register_trainer("my_async")
class MyTrainer(RhymeTrainerMixin, PPOTrainerColocateAsync):
    """Logs the share of full-length responses, and uses custom workers."""

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in {Role.Actor, Role.ActorRollout, Role.ActorRolloutRef} & set(self.role_worker_mapping):
            self.role_worker_mapping[role] = ray.remote(MyWorker)

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, **kwargs: Any) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, **kwargs)
        limit = self.config.data.max_response_length
        metrics["mine/full_length"] = sum(tag["response_len"] >= limit for tag in batch.tags) / len(batch.tags)
