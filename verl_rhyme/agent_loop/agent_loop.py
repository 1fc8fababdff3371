"""Subclasses of verl's agent loop managers (``actor_rollout_ref.rollout.agent.agent_loop_manager_class``), which make
the workers and send them validation prompts."""

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
from verl_rhyme.processes.waiting import waiting_for

logger = logging.getLogger(__name__)

#: verl's ``status`` of unfinished validation prompts.
_OPEN = ("pending", "running")


class RhymeAgentLoopManager(AgentLoopManagerTQ):
    """Manager of preset ``histospec``; with ``enable=false`` it equals verl's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if config_tree.from_rollout(self.rollout_config) is not None:
            self.agent_loop_workers_class = RhymeAgentLoopWorker


class SessionAgentLoopManager(AgentLoopManagerTQ):
    """Manager of all pipeline presets: makes the workers that the coordinator uses, and sends them validation prompts.
    It gives up a worker that died or does not answer, and sends its prompts to the others."""

    agent_loop_workers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = SessionAgentLoopWorker
        rhyme = config_tree.from_rollout(self.rollout_config)
        assert rhyme is not None, "the coordinator needs a config with rhyme"
        self._patience_s = rhyme.scheduling.lost_after
        self._ready: list[Any] = []  # started workers
        self._sent: list[tuple[Any, TensorDict]] = []  # workers with the validation prompts that each accepted

    def generate_sequences(self, prompts: TensorDict) -> None:
        self.forget_validation()  # verl has the samples of earlier ones
        self._send(prompts)

    def forget_validation(self) -> None:
        self._sent.clear()

    def resend_validation(self) -> None:
        """Send unfinished validation prompts that their workers do not run (any more) to others."""
        sent, self._sent = self._sent, []
        running = [self._running(worker) for worker, _ in sent]  # first: a prompt is finished before it runs no more
        tags = (tq.kv_list() or {}).get("val", {})  # verl has cleared earlier validations
        unfinished = {uid for uid, tag in tags.items() if tag.get("is_prompt") and tag.get("status") in _OPEN}
        for (worker, chunk), uids in zip(sent, running, strict=True):
            rows: dict[bool, list[int]] = {True: [], False: []}
            for row, uid in enumerate(map(str, chunk["uid"])):
                if uid in unfinished:
                    rows[uid in uids].append(row)
            if rows[True]:
                self._sent.append((worker, chunk[rows[True]]))
            if rows[False]:
                logger.warning("%d validation prompts start again", len(rows[False]))
                self._send(chunk[rows[False]])

    def _running(self, worker: Any) -> set[str]:
        try:
            return set(ray.get(worker.validating.remote(), timeout=self._patience_s))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            self._give_up(worker, error)
            return set()

    def replace_workers(self) -> list[Any]:
        """Replace all workers, when none is left."""
        auto_await(self._init_agent_loop_workers)()
        return self.agent_loop_workers

    def _send(self, prompts: TensorDict) -> None:
        self._await_start()
        chunks = prompts.chunk(len(self.agent_loop_workers))
        sent = [
            (worker, chunk, worker.generate_sequences.remote(chunk))
            for worker, chunk in zip(self.agent_loop_workers, chunks, strict=False)
        ]
        for worker, chunk, accepted in sent:
            self._await_answer(worker, accepted, chunk)

    def _await_answer(self, worker: Any, answer: Any, prompts: TensorDict) -> None:
        try:
            ray.get(answer, timeout=self._patience_s)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            self._give_up(worker, error)
            self._send(prompts)
        else:
            self._sent.append((worker, prompts))

    def _await_start(self) -> None:
        """Wait without a timeout: imports from a cold shared filesystem may exceed a running worker's patience."""
        for worker in [worker for worker in self.agent_loop_workers if worker not in self._ready]:
            try:
                with waiting_for("an agent loop worker to start"):
                    ray.get(worker.__ray_ready__.remote())
            except ray.exceptions.RayActorError as error:
                if len(self.agent_loop_workers) == 1:
                    raise  # no worker can start
                self._give_up(worker, error)
            else:
                self._ready.append(worker)

    def _give_up(self, worker: Any, error: Exception) -> None:
        left = [other for other in self.agent_loop_workers if other is not worker]
        if len(left) == len(self.agent_loop_workers):
            return  # already given up
        logger.warning("an agent loop worker is given up (%s); its samples start again on others", error)
        ray.kill(worker)  # one that only hangs must not return after its samples have started elsewhere
        self.agent_loop_workers = left
        if not left:
            self.replace_workers()
