"""Socket names for weight transfer from a run's workers to its engines, unique among runs.

verl names the sockets (``/tmp/rl-colocate-zmq-...``) by the job's number in its Ray cluster. Two runs on one machine
with a cluster each are both job 1. If they sync at the same time, an engine waits forever or loads the other run's
weights. The sender and the receiver add the cluster to the name here.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout import ServerAdapter

from verl_rhyme.config import config_tree

#: Environment variable by which verl's server passes the job id to its engine's processes.
_ENVIRONMENT = "VERL_RAY_JOB_ID"


def _job(cluster: str, job: str) -> str:
    return f"{job}-{hashlib.blake2b(cluster.encode(), digest_size=6).hexdigest()}"


def receive_here() -> None:
    """Set the job id in a server's process, before its engine starts."""
    context = ray.get_runtime_context()
    os.environ[_ENVIRONMENT] = _job(context.gcs_address, context.get_job_id())


class RhymeServerAdapter(ServerAdapter):
    """verl's server adapter of a worker. It behaves as verl's if the command has no rhyme tree."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config_tree.from_rollout(self.config) is not None:
            context = ray.get_runtime_context()
            job = context.get_job_id()
            verls = vars(self)["zmq_handle"]
            self.zmq_handle = verls.replace(f"-{job}-", f"-{_job(context.gcs_address, job)}-", 1)

    async def update_weights(self, weights: Any, global_steps: int | None = None, **kwargs: Any) -> Any:
        if config_tree.from_rollout(self.config) is not None:
            kwargs["version"] = global_steps
        return await super().update_weights(weights, global_steps=global_steps, **kwargs)
