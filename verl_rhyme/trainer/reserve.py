"""Lets replicas rest while generation is ahead of training, and wakes them when it falls behind.

The advice of the elastic rule (:mod:`~verl_rhyme.trainer.balance`) is carried out between two steps, when the actor has
the weights of the published policy. A replica that wakes gets these weights, like a new one, and is then added to the
router. A replica that goes to rest leaves the router first; its samples continue on others, with their tokens.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from verl_rhyme.config import CONFIG_PATH, ConfigError, ElasticConfig
from verl_rhyme.coordinator.replicas import SpareReplicas, single_transfer_obstacle
from verl_rhyme.observability import metrics as names
from verl_rhyme.planning.elastic import Limits
from verl_rhyme.processes.messages import RunSettings
from verl_rhyme.trainer.balance import Balance
from verl_rhyme.trainer.driver import Driver
from verl_rhyme.trainer.observers import Observer, Step

logger = logging.getLogger(__name__)


class Reserve(Observer):
    """Carries out the advice on the number of replicas.

    Args:
        setting: Settings of the run.
        config: ``streaming.elastic``.
        servers: verl's ``LLMServerManager``; all its replicas serve.
        engine: verl's ``CheckpointEngineConfig``.
        spares: Object that lets replicas rest and wakes them.

    Attributes:
        balance: Source of the advice.

    Raises:
        ConfigError: There are fewer replicas than ``min_replicas``, or weights cannot be sent to a single one.
    """

    def __init__(
        self, setting: RunSettings, config: ElasticConfig, servers: Any, engine: Any, spares: SpareReplicas
    ) -> None:
        self._servers, self._spares = servers, spares
        replicas = servers.get_replicas()
        if why := single_transfer_obstacle(engine, len(replicas[0].workers)):
            raise ConfigError(f"{CONFIG_PATH}.streaming.elastic.min_replicas: {why}; use the relay, or drop the option")
        launched = self._launched = self._reported = len(replicas)
        self._least, self._most = config.min_replicas or 1, min(launched, config.max_replicas or launched)
        if self._least > self._most:
            raise ConfigError(
                f"{CONFIG_PATH}.streaming.elastic.min_replicas={self._least}: the run has only {launched}; lower it"
            )
        self.balance = Balance(setting, Limits(self._least, self._most))

    def begin(self, driver: Driver) -> None:
        """Let surplus replicas rest, once the coordinator is open."""
        self._driver = driver
        for replica in self._servers.get_replicas()[self._most :]:
            self._rest(replica)

    def on_step(self, step: Step) -> dict[str, float]:
        """Carry out the advice, except after the last step.

        Raises:
            ReplicaDied: A replica did not get its weights.
        """
        self.observe()
        metrics = self.balance.on_step(step)
        return metrics | self.act(0 if step.last else self.balance.advice, step.number)

    def observe(self) -> None:
        """Report a changed number of replicas at the end of a step."""
        if len(self._servers.get_replicas()) != self._reported:  # one died, or a new one serves
            self._report()

    def act(self, advice: int, version: int) -> dict[str, float]:
        """Carry out an advice; the actor has the weights of the policy ``version``, which is published.

        Args:
            advice: One replica more (1), one less (-1), or no change (0).
            version: Version of the published policy.

        Returns:
            Metrics of the step.

        Raises:
            ReplicaDied: A replica did not get its weights.
        """
        serving = self._servers.get_replicas()
        metrics = {names.STREAM_REPLICAS: float(len(serving))}
        began = time.monotonic()
        if advice > 0 and len(serving) + self._spares.missing < self._most:  # starting replicas count
            replica = self._spares.wake_up(version)
            if replica is None:  # none rests: one is starting, or none may start
                return metrics
            self._report()
        elif advice < 0 and len(serving) > self._least:
            replica = serving[-1]
            metrics[names.STREAM_MOVED] = float(self._rest(replica))
        else:
            return metrics
        metrics[names.STREAM_CHANGE] = time.monotonic() - began
        what, count = "serves again" if advice > 0 else "rests", len(self._servers.get_replicas())
        logger.info(
            "replica %d %s; %d of %d serve now (%.1f s)",
            *(replica.replica_rank, what, count, self._launched, metrics[names.STREAM_CHANGE]),
        )
        return metrics

    # ---- internal ----

    def _rest(self, replica: Any) -> int:
        return self._spares.suspend(replica, lambda address: self._report(address))

    def _report(self, leaves: str = "") -> int:
        self._reported = len(self._servers.get_replicas())
        return self._driver.serve(self._reported / self._launched, leaves)
