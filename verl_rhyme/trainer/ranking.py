"""The trainer's calls to the length ranker: it sends loaded prompts and finished lengths, and waits for neither.

A failed call costs only the ranker's predictions. It is counted, the first one is logged, and forecasts continue
without. Ray restarts a process that died, which then loads the last checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError
from transfer_queue import KVBatchMeta

from verl_rhyme.config import RankerConfig
from verl_rhyme.coordinator.ranker_service import RankerActor
from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.errors import first_line
from verl_rhyme.processes.messages import Reply
from verl_rhyme.trainer.driver import Driver
from verl_rhyme.trainer.observers import Observer, Step

logger = logging.getLogger(__name__)

#: Maximum number of pending calls; beyond it calls are left out.
_MAX_PENDING = 64
#: Seconds that a checkpoint waits for the ranker.
_SAVE_S = 60.0


class Ranking(Observer):
    """Drives a run's length ranker: ``actor``, or a new one.

    Args:
        config: Options of the ranker, with a ``kind``.
        tokenizer: Tokenizer of the policy.
        template: Options of its chat template.
    """

    def __init__(self, config: RankerConfig, tokenizer: Any, template: Mapping[str, Any], actor: Any = None) -> None:
        self.failures, self.trained = 0, 0
        self._pending: list[Any] = []
        self._checkpoint: str | None = None
        self._saving: Any = None
        self._actor = actor or _start(config, tokenizer, dict(template))

    def on_train_begin(self, driver: Driver) -> None:
        self._coordinator = driver.coordinator

    def on_prompts(self, prompts: Mapping[str, Any]) -> None:
        """Announce prompts; the ranker sends their predicted lengths to the coordinator."""
        self._send("announce", {key: messages for key, messages in prompts.items() if key}, self._coordinator)

    def on_batch(self, batch: KVBatchMeta, reply: Reply, step: int, epoch: int) -> None:
        """Send the lengths of the prompts that left."""
        self._send("learn", reply.answered)

    def on_step(self, step: Step) -> dict[str, float]:
        """Return the number of trainings and of failures known so far."""
        self._collect()
        failed = {names.RANKER_FAILURES: float(self.failures)} if self.failures else {}
        return {names.RANKER_TRAINED: float(self.trained), **failed}

    def save(self, folder: str) -> None:
        self._collect()
        if self._saving is not None and not ray.wait([self._saving], timeout=0)[0]:
            self._failed(TimeoutError("the ranker is still writing the checkpoint before"))
            return
        self._saving = self._actor.save.remote(folder)
        try:
            ray.get(self._saving, timeout=_SAVE_S)
            self._checkpoint = folder
        except Exception as error:
            self._failed(error)

    def load(self, folder: str) -> None:
        """Restore the ranker; what the checkpoint lacks is learnt again."""
        self._checkpoint = folder
        self._pending.append(self._actor.restore.remote(folder))

    def close(self) -> None:
        ray.kill(self._actor)

    def _send(self, method: str, what: Mapping[str, Any], *arguments: Any) -> None:
        self._collect()
        if not what:
            return
        if len(self._pending) >= _MAX_PENDING:
            self._failed(TimeoutError(f"{_MAX_PENDING} calls are pending: further calls are left out"))
            return
        self._pending.append(getattr(self._actor, method).remote(what, *arguments))

    def _collect(self) -> None:
        """Collect finished calls, without waiting."""
        if not self._pending:
            return
        done, self._pending = ray.wait(self._pending, num_returns=len(self._pending), timeout=0)
        died = False
        for call in done:
            try:
                self.trained = max(self.trained, ray.get(call))
            except Exception as error:
                died = died or isinstance(error, RayActorError)
                self._failed(error)
        if died and self._checkpoint is not None:
            self.load(self._checkpoint)  # fails and is called again until the process runs

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning("the length ranker failed; forecasts do without it (logged once): %s", first_line(error))


def _start(config: RankerConfig, tokenizer: Any, template: dict[str, Any]) -> Any:
    """Start the ranker on this node, which has the checkpoint folders."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    options = {
        "num_cpus": 0,
        "max_restarts": -1,
        # More threads than the training one: the previous ranker scores prompts meanwhile.
        "max_concurrency": 4,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=here, soft=False),
    }
    return ray.remote(RankerActor).options(**options).remote(config, tokenizer, template)
