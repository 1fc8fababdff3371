"""verl's agent loop managers: they make our workers, and hand them validation prompts."""

from __future__ import annotations

import logging
from typing import Any

import ray
import transfer_queue as tq
from tensordict import TensorDict
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl.utils.ray_utils import auto_await

from verl_rhyme.agent_loop.worker import RhymeAgentLoopWorker, SessionAgentLoopWorker
from verl_rhyme.config import config_tree

logger = logging.getLogger(__name__)

#: Of a validation prompt that is not done, as verl tags it.
_OPEN = ("pending", "running")


class RhymeAgentLoopManager(AgentLoopManagerTQ):
    """``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` of ``+rhyme=...``; verl's with ``enable=false``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if config_tree.from_rollout(self.rollout_config) is not None:
            self.agent_loop_workers_class = RhymeAgentLoopWorker


class SessionAgentLoopManager(AgentLoopManagerTQ):
    """``actor_rollout_ref.rollout.agent.agent_loop_manager_class`` of every preset with the pipeline.

    Makes the workers that the coordinator drives, and hands them validation prompts. A worker that died, or does not
    answer, is given up: what it was to do goes to the others.
    """

    agent_loop_workers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = SessionAgentLoopWorker
        rhyme = config_tree.from_rollout(self.rollout_config)
        assert rhyme is not None, "a coordinator starts samples of runs with rhyme only"
        self._patience_s = rhyme.scheduling.lost_after
        self._ready: list[Any] = []  # workers that have started
        self._handed: list[tuple[Any, TensorDict]] = []  # workers, and the validation prompts that each took

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Hand prompts to the workers, without waiting for what becomes of them."""
        self._await_start()
        chunks = prompts.chunk(len(self.agent_loop_workers))
        sent = [
            (worker, chunk, worker.generate_sequences.remote(chunk))
            for worker, chunk in zip(self.agent_loop_workers, chunks, strict=False)
        ]
        for worker, chunk, taken in sent:
            try:
                ray.get(taken, timeout=self._patience_s)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                self._give_up(worker, error)
                self.generate_sequences(chunk)
            else:
                self._handed.append((worker, chunk))

    def look(self) -> None:
        """Validation prompts that a worker had taken which is gone, and that are not done, go to others."""
        handed, self._handed = self._handed, []
        tags = (tq.kv_list() or {}).get("val", {})  # without those of earlier validations, which verl has cleared
        undone = {uid for uid, tag in tags.items() if tag.get("is_prompt") and tag.get("status") in _OPEN}
        for worker, chunk in handed:
            rows = [row for row, uid in enumerate(chunk["uid"]) if str(uid) in undone]
            if not rows:
                continue
            try:
                ray.get(worker.__ray_ready__.remote(), timeout=self._patience_s)
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                self._give_up(worker, error)
                self.generate_sequences(chunk[rows])
            else:
                self._handed.append((worker, chunk))

    def renew(self) -> list[Any]:
        """Make other workers in the place of all: none is left."""
        auto_await(self._init_agent_loop_workers)()
        return self.agent_loop_workers

    def _await_start(self) -> None:
        """Imports from a cold shared filesystem may take longer than a worker that runs may be silent."""
        for worker in [worker for worker in self.agent_loop_workers if worker not in self._ready]:
            try:
                ray.get(worker.__ray_ready__.remote())
            except ray.exceptions.RayActorError as error:
                if len(self.agent_loop_workers) == 1:
                    raise  # none can start
                self._give_up(worker, error)
            else:
                self._ready.append(worker)

    def _give_up(self, worker: Any, error: Exception) -> None:
        left = [other for other in self.agent_loop_workers if other is not worker]
        if len(left) == len(self.agent_loop_workers):
            return  # already
        logger.warning("an agent loop worker is given up, its samples start again elsewhere: %s", error)
        ray.kill(worker)  # one that only hangs must not come back with what others do by then
        self.agent_loop_workers = left
        if not left:
            self.renew()
