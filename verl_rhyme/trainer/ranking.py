"""The trainer's calls to the length ranker: it sends loaded prompts and does not wait. A failed call costs only the
ranker's predictions: it is counted, the first one is logged, and forecasts continue without. Ray restarts a process
that died."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray

from verl_rhyme.coordinator.ranker_service import RankerActor
from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.errors import first_line
from verl_rhyme.trainer.driver import Driver
from verl_rhyme.trainer.observers import Observer, Step

logger = logging.getLogger(__name__)

#: Maximum number of pending calls; beyond it calls are left out.
_MAX_PENDING = 64


class Ranking(Observer):
    """Drives a run's length ranker: ``actor``, or a new one; the other arguments are :class:`RankerActor`'s."""

    def __init__(self, folder: str, tokenizer: Any, template: Mapping[str, Any], actor: Any = None) -> None:
        self.failures = 0
        self._pending: list[Any] = []
        options = {"num_cpus": 0, "max_restarts": -1}
        self._actor = actor or ray.remote(RankerActor).options(**options).remote(folder, tokenizer, dict(template))

    def on_train_begin(self, driver: Driver) -> None:
        self._coordinator = driver.coordinator

    def on_prompts(self, prompts: Mapping[str, Any]) -> None:
        self._collect()
        if len(self._pending) >= _MAX_PENDING:
            self._failed(TimeoutError(f"{_MAX_PENDING} calls are pending: further calls are left out"))
        elif known := {key: messages for key, messages in prompts.items() if key}:
            self._pending.append(self._actor.score.remote(known, self._coordinator))

    def on_step(self, step: Step) -> dict[str, float]:
        self._collect()
        return {names.RANKER_FAILURES: float(self.failures)} if self.failures else {}

    def close(self) -> None:
        ray.kill(self._actor)

    def _collect(self) -> None:
        if not self._pending:
            return
        done, self._pending = ray.wait(self._pending, num_returns=len(self._pending), timeout=0)
        for call in done:
            try:
                ray.get(call)
            except Exception as error:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning("the length ranker failed; forecasts do without it (logged once): %s", first_line(error))
