"""verl's vLLM replica, launching our server where the command has a rhyme tree, and stock verl's elsewhere."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from verl_rhyme.config import config_tree
from verl_rhyme.engine.server import RhymeHttpServer

#: Calls that a server takes at a time. Each request holds one until its response ends, and questions stand in the same
#: queue: verl's bound (1000, or the engine's slots and 16 more) is below what many a run has in flight, and a server
#: that is only busy could neither be asked whether it lives nor be stopped.
MAX_CONCURRENCY = 1 << 16


class RhymeReplica(vLLMReplica):
    """``rollout.name=vllm``. Reward and teacher models stay as they are: their prompts have no history."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ours = not (self.is_reward_model or self.is_teacher_model)
        self._rhyme = ours and config_tree.from_rollout(self.config) is not None
        if self._rhyme:
            self.server_class = ray.remote(RhymeHttpServer)

    @property
    def max_concurrency(self) -> int:
        """Of the server actor."""
        return MAX_CONCURRENCY if self._rhyme else super().max_concurrency
