"""Where the weights of one run pass from its workers to its engines: at no other run's socket.

verl names the sockets (``/tmp/rl-colocate-zmq-...``) by the job's number in its Ray cluster. Two runs on a machine that
have a cluster each are job 1 both: when they sync at the same time, an engine waits for ever, or loads the other run's
weights. Sender and receiver add the cluster here.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout import ServerAdapter

from verl_rhyme.config import config_tree

#: verl's server leaves it to its engine's processes, which name the socket by it.
_ENVIRONMENT = "VERL_RAY_JOB_ID"


def _job(cluster: str, job: str) -> str:
    return f"{job}-{hashlib.blake2b(cluster.encode(), digest_size=6).hexdigest()}"


def receive_here() -> None:
    """In a server's process, before its engine starts."""
    context = ray.get_runtime_context()
    os.environ[_ENVIRONMENT] = _job(context.gcs_address, context.get_job_id())


class RhymeServerAdapter(ServerAdapter):
    """verl's hand of a worker on its engine; without rhyme in the command it is verl's."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config_tree.from_rollout(self.config) is not None:
            context = ray.get_runtime_context()
            job = context.get_job_id()
            verls = vars(self)["zmq_handle"]
            self.zmq_handle = verls.replace(f"-{job}-", f"-{_job(context.gcs_address, job)}-", 1)
