"""verl's agent loop manager and worker, telling each request the number of its sample in the group."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_rhyme.workers.request import RequestMeta

# AgentLoopWorkerTQ is a Ray actor class, and Ray forbids to inherit from those: take the plain class below it.
_AgentLoopWorker: type = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__mro__[1]


@ray.remote
class RhymeAgentLoopWorker(_AgentLoopWorker):  # type: ignore[misc, valid-type]
    """Adds the sample number. A Ray actor class, as verl's is."""

    async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any) -> Any:
        sampling_params = RequestMeta(sample=int(kwargs.get("session_id", -1))).put(sampling_params)
        return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)


class RhymeAgentLoopManager(AgentLoopManagerTQ):
    """``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` of ``+rhyme=...``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = RhymeAgentLoopWorker
