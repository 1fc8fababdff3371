"""verl's vLLM replica. It launches our server if the command has a rhyme tree, else verl's server."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from verl_rhyme.config import config_tree
from verl_rhyme.engine.server import RhymeHttpServer

#: Concurrent calls of a server actor. Each request holds one until its response ends, and health checks use the same
#: queue. Many runs have more requests in flight than verl's bound (1000, or the engine's slots plus 16); a busy server
#: could then neither be checked nor stopped.
MAX_CONCURRENCY = 1 << 16


class RhymeReplica(vLLMReplica):
    """Replica for ``rollout.name=vllm``. Reward and teacher models keep verl's server: they have no history."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ours = not (self.is_reward_model or self.is_teacher_model)
        self._rhyme = ours and config_tree.from_rollout(self.config) is not None
        if self._rhyme:
            self.server_class = ray.remote(RhymeHttpServer)

    @property
    def max_concurrency(self) -> int:
        return MAX_CONCURRENCY if self._rhyme else super().max_concurrency
