"""verl's vLLM replica, launching our server where the command has a rhyme tree, and stock verl's elsewhere."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from verl_rhyme import config_tree
from verl_rhyme.workers.vllm.server import RhymeHttpServer


class RhymeReplica(vLLMReplica):
    """``rollout.name=vllm``. Reward and teacher models stay as they are: their prompts have no history."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ours = not (self.is_reward_model or self.is_teacher_model)
        if ours and config_tree.from_rollout(self.config) is not None:
            self.server_class = ray.remote(RhymeHttpServer)
