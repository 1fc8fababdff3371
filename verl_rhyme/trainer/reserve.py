"""Replicas that rest while generation is ahead of training, and return when it falls behind.

The elastic rule's advice (:mod:`~verl_rhyme.trainer.balance`) is carried out between two steps, when the actor's
weights are those of the policy that was just published: a replica that returns gets them like one that was started in
the place of a dead one, and is admitted to the router after that. One that goes leaves the router first; what runs
there goes on at others with the tokens it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from verl_rhyme.config import CONFIG_PATH, ConfigError, ElasticConfig
from verl_rhyme.coordinator.replicas import Spares, obstacle
from verl_rhyme.observability import metrics as names
from verl_rhyme.planning.elastic import Limits
from verl_rhyme.processes.messages import Serving, Setting
from verl_rhyme.trainer.balance import Balance
from verl_rhyme.trainer.driver import Driver
from verl_rhyme.trainer.observers import Observer, Step

logger = logging.getLogger(__name__)


class Reserve(Observer):
    """One for a run.

    Args:
        setting: The run's.
        config: ``streaming.elastic``.
        servers: verl's ``LLMServerManager`` of the replicas, all of which serve.
        engine: verl's ``CheckpointEngineConfig``.
        spares: Puts them to rest and wakes them.
        slots: Q of the bubble ratio, of those that serve at the call.

    Attributes:
        balance: What advises a change.

    Raises:
        ConfigError: There are not so many replicas, or weights cannot be sent to one alone.
    """

    def __init__(
        self,
        setting: Setting,
        config: ElasticConfig,
        servers: Any,
        engine: Any,
        spares: Spares,
        slots: Callable[[], int],
    ) -> None:
        self._servers, self._spares, self._slots = servers, spares, slots
        replicas = servers.get_replicas()
        if why := obstacle(engine, len(replicas[0].workers)):
            raise ConfigError(f"{CONFIG_PATH}.streaming.elastic.min_replicas: {why}; use the relay, or drop it")
        launched = self._launched = self._told = len(replicas)
        self._least, self._most = config.min_replicas or 1, min(launched, config.max_replicas or launched)
        if self._least > self._most:
            raise ConfigError(
                f"{CONFIG_PATH}.streaming.elastic.min_replicas={self._least}: there are {launched}; lower it"
            )
        self.balance = Balance(setting, Limits(self._least, self._most))

    def begin(self, driver: Driver) -> None:
        """Those that are not to serve at the start go to rest; the coordinator is open."""
        self._driver = driver
        for replica in self._servers.get_replicas()[self._most :]:
            self._rest(replica)

    def on_step(self, step: Step) -> dict[str, float]:
        """Carry out what the balance advises; not after the last step.

        Raises:
            ReplicaDied: One that was to return did not get its weights.
        """
        self.observe()
        metrics = self.balance.on_step(step)
        return metrics | self.act(0 if step.last else self.balance.advice, step.number)

    def observe(self) -> None:
        """A step ended."""
        if len(self._servers.get_replicas()) != self._told:  # one died, or serves that had to be started
            self._report()

    def act(self, advice: int, version: int) -> dict[str, float]:
        """Carry it out; the actor has the weights of the policy ``version``, which is published.

        Args:
            advice: A replica more (1), one less (-1), or neither (0).
            version: Of the policy.

        Returns:
            Metrics of the step that led to it.

        Raises:
            ReplicaDied: One that was to return did not get its weights.
        """
        serving = self._servers.get_replicas()
        told = {names.STREAM_REPLICAS: float(len(serving))}
        began = time.monotonic()
        if advice > 0 and len(serving) + self._spares.missing < self._most:  # those that start will serve, too
            replica = self._spares.wake(version)
            if replica is None:  # none rests: one is being started, or there is no place
                return told
            self._report()
        elif advice < 0 and len(serving) > self._least:
            replica = serving[-1]
            told[names.STREAM_MOVED] = float(self._rest(replica))
        else:
            return told
        told[names.STREAM_CHANGE] = time.monotonic() - began
        what, count = "serves again" if advice > 0 else "rests", len(self._servers.get_replicas())
        logger.info(
            "replica %d %s, %d of %d serve now (%.1f s)",
            *(replica.replica_rank, what, count, self._launched, told[names.STREAM_CHANGE]),
        )
        return told

    # ---- within ----

    def _rest(self, replica: Any) -> int:
        return self._spares.rest(replica, lambda address: self._report(address))

    def _report(self, leaves: str = "") -> int:
        self._told = len(self._servers.get_replicas())
        return self._driver.serve(Serving(self._told / self._launched, self._slots()), leaves)
