"""The elastic rule of the pipeline: whether one replica more or less would be better, as advice or carried out.

Where rollout continues while the actor trains, a step shows one of two times. If generation is slower, the trainer
waits for its batch; if generation is faster, the batch is ready before. ``T_train = step - wait_s`` and
``T_gen = step - ahead`` go into the rule (:class:`~verl_rhyme.planning.elastic.Elastic`).

Its advice is carried out between two steps, when the actor has the weights of the published policy. A replica that
wakes gets these weights, like a new one, and is then added to the router. A replica that goes to rest leaves the router
first; its samples continue on others, with their tokens.
"""

from __future__ import annotations

import logging
import time
from statistics import median
from typing import Any

import numpy as np

from verl_rhyme.config import CONFIG_PATH, ConfigError, ElasticConfig
from verl_rhyme.coordinator.replicas import SpareReplicas, single_transfer_obstacle
from verl_rhyme.observability import metrics as names
from verl_rhyme.planning.elastic import Elastic, Limits
from verl_rhyme.planning.times import Work, rollout
from verl_rhyme.processes.messages import Reply, RunSettings
from verl_rhyme.trainer.driver import Driver
from verl_rhyme.trainer.observers import Observer, Step

logger = logging.getLogger(__name__)


class ReplicaAdvisor(Observer):
    """Compares generation with training; reports in metrics and log whether the number of replicas should change.

    Attributes:
        advice: Advice of the latest step: 1, one replica more; -1, one less; 0, no change.
    """

    def __init__(self, setting: RunSettings, limits: Limits | None = None) -> None:
        self._setting = setting
        self._limits = Limits() if limits is None else limits
        self.advice = 0
        self._elastic: Elastic | None = None
        self._work: Work | None = None
        self._scale = 1.0
        self._logged = 0
        self._failed = False

    def on_step(self, step: Step) -> dict[str, float]:
        """Set :attr:`advice` and return metrics; none if rollout stands still while the actor trains."""
        self.advice = 0
        reply, seconds = step.reply, step.seconds
        ahead = None if reply is None else reply.metrics.get(names.STREAM_AHEAD)
        if reply is None or ahead is None or not (seconds > 0 and step.replicas):
            return {}
        try:
            return self._compare(step.replicas, seconds, min(step.wait_s, seconds), min(ahead, seconds), reply)
        except Exception:  # advice must not end a run
            if not self._failed:
                logger.warning("generation and training could not be compared (logged once)", exc_info=True)
            self._failed = True
            return {}

    def _compare(self, replicas: int, step: float, waited: float, ahead: float, reply: Reply) -> dict[str, float]:
        real = [tag for tag in reply.tags if not tag.get("is_padding", False)]
        lengths = np.array([tag["response_len"] for tag in real], dtype=float)
        prompts = np.mean([tag["seq_len"] for tag in real]) - np.mean(lengths)
        rules = self._setting.rules
        group = max(1, rules.batch_samples // rules.batch_prompts)
        self._work = Work(np.maximum(lengths, 1.0), len(real), group, max(0.0, float(prompts)))
        if reply.paces:  # scale the cost model to this machine, as measured training seconds are this machine's
            rows = min(self._setting.cost.slots, max(1, len(real) // replicas))
            self._scale = median(reply.paces.values()) / self._setting.cost.step.seconds(rows)
        if self._elastic is None:
            limits = self._limits
            self._elastic = Elastic(self._predict, min(max(replicas, limits.least), limits.most), limits)
        self._elastic.set_units(replicas)
        advice = self._elastic.observe(step - ahead, step - waited)
        if advice.change and advice.change != self._logged:
            logger.info(
                "%d replicas: %s would be better (generation %+.1f s against training, %.1f s a replica): %s",
                *(replicas, "one more" if advice.change > 0 else "one less"),
                *(advice.delta, advice.saving, advice.reason),
            )
        self._logged = self.advice = advice.change
        return {names.STREAM_BEHIND: advice.delta, names.STREAM_ELASTIC: float(advice.change)}

    def _predict(self, replicas: int) -> float:
        assert self._work is not None
        cost, bound = self._setting.cost.slowed(self._scale), self._setting.rules.max_staleness
        return float(rollout(cost, replicas, self._work, bound))  # without training, with which it is compared


class ReplicaScaler(ReplicaAdvisor):
    """Carries out the advice on the number of replicas.

    Args:
        setting: Settings of the run.
        config: ``streaming.elastic``.
        servers: verl's ``LLMServerManager``; all its replicas serve.
        engine: verl's ``CheckpointEngineConfig``.
        spares: Object that lets replicas rest and wakes them.

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
        least, most = config.min_replicas or 1, min(launched, config.max_replicas or launched)
        if least > most:
            raise ConfigError(
                f"{CONFIG_PATH}.streaming.elastic.min_replicas={least}: the run has only {launched}; lower it"
            )
        super().__init__(setting, Limits(least, most))

    def on_train_begin(self, driver: Driver) -> None:
        """Let surplus replicas rest, once the coordinator is open."""
        self._driver = driver
        for replica in self._servers.get_replicas()[self._limits.most :]:
            self._rest(replica)

    def on_step(self, step: Step) -> dict[str, float]:
        """Carry out the advice, except after the last step.

        Raises:
            ReplicaDied: A replica did not get its weights.
        """
        self.report_changes()
        metrics = super().on_step(step)
        return metrics | self.scale(0 if step.last else self.advice, step.number)

    def report_changes(self) -> None:
        """Report a changed number of replicas at the end of a step: one died, or a new one serves."""
        if len(self._servers.get_replicas()) != self._reported:
            self._report()

    def scale(self, advice: int, version: int) -> dict[str, float]:
        """Carry out an advice, and return metrics.

        Args:
            advice: One replica more (1), one less (-1), or no change (0).
            version: Version of the published policy, which is the actor's.

        Raises:
            ReplicaDied: A replica did not get its weights.
        """
        serving = self._servers.get_replicas()
        metrics = {names.STREAM_REPLICAS: float(len(serving))}
        began = time.monotonic()
        if advice > 0 and len(serving) + self._spares.missing < self._limits.most:  # starting replicas count
            replica = self._spares.wake_up(version)
            if replica is None:  # none rests: one is starting, or none may start
                return metrics
            self._report()
        elif advice < 0 and len(serving) > self._limits.least:
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

    def _rest(self, replica: Any) -> int:
        return self._spares.suspend(replica, lambda address: self._report(address))

    def _report(self, leaves: str = "") -> int:
        self._reported = len(self._servers.get_replicas())
        return self._driver.serve(self._reported / self._launched, leaves)
