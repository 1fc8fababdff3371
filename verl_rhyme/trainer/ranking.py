"""The trainer's calls to the length ranker: it sends loaded prompts and does not wait. A failed call costs only the
ranker's predictions: it is counted, and forecasts continue without. Ray restarts a process that died."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import ray

from verl_rhyme.coordinator.ranker_service import RankerActor
from verl_rhyme.observability import metrics as names
from verl_rhyme.observability.errors import first_line
from verl_rhyme.once import warn_once
from verl_rhyme.trainer.driver import Driver
from verl_rhyme.trainer.observers import Observer, Step

logger = logging.getLogger(__name__)

#: Of a ranker that hangs, at most so many calls wait; Ray refuses further ones.
_OPTIONS = {"num_cpus": 0, "max_restarts": -1, "max_pending_calls": 64}


class Ranking(Observer):
    """Drives a run's length ranker; the arguments are :class:`RankerActor`'s."""

    def __init__(self, folder: str, tokenizer: Any, template: Mapping[str, Any]) -> None:
        self.failures = 0
        self._pending: list[Any] = []
        self._actor = ray.remote(RankerActor).options(**_OPTIONS).remote(folder, tokenizer, dict(template))

    def on_train_begin(self, driver: Driver) -> None:
        self._coordinator = driver.coordinator

    def on_prompts(self, prompts: Mapping[str, Any]) -> None:
        if known := {key: messages for key, messages in prompts.items() if key}:
            try:
                self._pending.append(self._actor.score.remote(known, self._coordinator))
            except ray.exceptions.RayError as error:
                self._failed(error)

    def on_step(self, step: Step) -> dict[str, float]:
        done: list[Any] = []
        if self._pending:
            done, self._pending = ray.wait(self._pending, num_returns=len(self._pending), timeout=0)
        for call in done:
            try:
                ray.get(call)
            except Exception as error:
                self._failed(error)
        return {names.RANKER_FAILURES: float(self.failures)} if self.failures else {}

    def close(self) -> None:
        ray.kill(self._actor)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        warn_once(logger, "the length ranker failed; forecasts do without it (logged once): %s", first_line(error))
