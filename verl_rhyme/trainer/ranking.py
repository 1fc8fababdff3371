"""The trainer's hand on the length ranker: it tells what is loaded and what was answered, and waits for nothing.

Whatever fails costs the ranker's word: it is counted, the first failure is a warning, and forecasts go on without. A
process that dies is started anew by Ray, and takes up the last checkpoint.
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

#: Calls that may be under way; where it is behind by more, a step's are left out.
_UNDER_WAY = 64
#: Seconds that a checkpoint waits for it.
_SAVE_S = 60.0


class Ranking(Observer):
    """One for a run.

    Args:
        config: Of the run, ``enable`` true.
        tokenizer: The policy's.
        template: Options of its chat template.
        actor: In the place of one that is started here.
    """

    def __init__(self, config: RankerConfig, tokenizer: Any, template: Mapping[str, Any], actor: Any = None) -> None:
        self.failures, self.trained = 0, 0
        self._under_way: list[Any] = []
        self._checkpoint: str | None = None
        self._saving: Any = None
        self._actor = actor or _start(config, tokenizer, dict(template))

    def on_prompts(self, prompts: Mapping[str, Any], driver: Driver) -> None:
        """As soon as their lengths are predicted, the ranker reports them to the coordinator."""
        self._send("announce", {key: messages for key, messages in prompts.items() if key}, driver.coordinator)

    def on_batch(self, batch: KVBatchMeta, reply: Reply, step: int, epoch: int) -> None:
        """The ranker learns from the lengths of the prompts that left."""
        self._send("learn", reply.answered)

    def on_step(self, step: Step) -> dict[str, float]:
        """How often it was trained, and what failed, as far as that is known."""
        self._look()
        failed = {names.RANKER_FAILURES: float(self.failures)} if self.failures else {}
        return {names.RANKER_TRAINED: float(self.trained), **failed}

    def save(self, folder: str) -> None:
        self._look()
        if self._saving is not None and not ray.wait([self._saving], timeout=0)[0]:
            self._failed(TimeoutError("it has not written the checkpoint before yet"))
            return
        self._saving = self._actor.save.remote(folder)
        try:
            ray.get(self._saving, timeout=_SAVE_S)
            self._checkpoint = folder
        except Exception as error:
            self._failed(error)

    def load(self, folder: str) -> None:
        """What the checkpoint lacks, or what cannot be read, is learnt again."""
        self._checkpoint = folder
        self._under_way.append(self._actor.restore.remote(folder))

    def close(self) -> None:
        ray.kill(self._actor)

    def _send(self, method: str, what: Mapping[str, Any], *arguments: Any) -> None:
        self._look()
        if not what:
            return
        if len(self._under_way) >= _UNDER_WAY:
            self._failed(TimeoutError(f"it is behind by {_UNDER_WAY} calls: what comes meanwhile is left out"))
            return
        self._under_way.append(getattr(self._actor, method).remote(what, *arguments))

    def _look(self) -> None:
        """At what came of calls, without waiting."""
        if not self._under_way:
            return
        done, self._under_way = ray.wait(self._under_way, num_returns=len(self._under_way), timeout=0)
        died = False
        for call in done:
            try:
                self.trained = max(self.trained, ray.get(call))
            except Exception as error:
                died = died or isinstance(error, RayActorError)
                self._failed(error)
        if died and self._checkpoint is not None:
            self.load(self._checkpoint)  # fails as well until the process is there again, and is asked anew

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning("the length ranker failed, forecasts go on without it (told once): %s", first_line(error))


def _start(config: RankerConfig, tokenizer: Any, template: dict[str, Any]) -> Any:
    """On this node, whose folder the checkpoints are."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    options = {
        "num_cpus": 0,
        "max_restarts": -1,
        # Threads beside the one that trains: prompts are scored by the ranker before, meanwhile.
        "max_concurrency": 4,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=here, soft=False),
    }
    return ray.remote(RankerActor).options(**options).remote(config, tokenizer, template)
