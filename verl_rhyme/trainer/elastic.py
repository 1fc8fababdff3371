"""Elastic replicas (StreamRL, arXiv:2504.15930, section 4.2): one more when generation is behind, one less when ahead.

Where rollout continues while the actor trains, a step shows one of two times: the trainer waits for its batch, or the
batch is ready before. So ``T_train = step - wait_s`` and ``T_gen = step - ahead``. As published, a replica is added
when ``T_gen - T_train`` is at least what it saves, so that generation is still no faster than training. Here each of n
replicas has 1 / n of the work, and one rests by the same rule. Medians over some steps count, since steps come in pairs
of long and short. Steps after a change do not. A change is made between two steps, when the actor has the weights of
the published policy, which a replica that wakes gets before it is added to the router. One that goes to rest leaves the
router first; its samples continue on others, with their tokens.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from statistics import median
from typing import Any

from verl_rhyme.config import CONFIG_PATH, ConfigError, ElasticConfig
from verl_rhyme.config.backends import backend
from verl_rhyme.observability import metrics as names
from verl_rhyme.trainer.driver import Driver
from verl_rhyme.trainer.observers import Observer, Step
from verl_rhyme.trainer.replicas import SpareReplicas

logger = logging.getLogger(__name__)

#: Steps in the medians, steps after a change that do not count, and the share of a step that a change must gain.
WINDOW, SETTLING, MARGIN = 4, 2, 0.02


def advise(generated: float, trained: float, replicas: int) -> int:
    """Return the change of the number of replicas, 1, -1 or 0, by a step's seconds of generation and training."""
    margin = MARGIN * max(generated, trained)
    if generated * replicas / (replicas + 1) >= trained + margin:
        return 1
    if replicas > 1 and generated * replicas / (replicas - 1) <= trained - margin:
        return -1
    return 0


class ElasticReplicas(Observer):
    """Advice on the number of replicas in the metrics; with ``spares``, it is carried out. Raise ``ConfigError`` if
    there are fewer replicas than ``min_replicas``, or weights cannot be sent to a single one."""

    def __init__(
        self,
        config: ElasticConfig | None = None,  # streaming.elastic
        servers: Any = None,  # verl's LLMServerManager; all its replicas serve
        engine: Any = None,  # verl's CheckpointEngineConfig
        spares: SpareReplicas | None = None,  # lets replicas rest and wakes them; None: advice alone
    ) -> None:
        self._servers, self._spares = servers, spares
        self._least, self._most = 1, 1 << 20
        self._seen: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._replicas = self._settling = 0
        if config is None or spares is None:
            return
        option, replicas = f"{CONFIG_PATH}.streaming.elastic.min_replicas", servers.get_replicas()
        if why := backend(engine.backend).obstacle(len(replicas[0].workers)):
            raise ConfigError(f"{option}, checkpoint_engine.backend={engine.backend}: {why}; use the relay, or drop it")
        launched = self._launched = self._reported = len(replicas)
        self._least, self._most = config.min_replicas or 1, min(launched, config.max_replicas or launched)
        if self._least > self._most:
            raise ConfigError(f"{option}={self._least}: the run has only {launched}; lower it")

    def on_train_begin(self, driver: Driver) -> None:
        self._driver = driver
        if self._spares is not None:
            for replica in self._servers.get_replicas()[self._most :]:
                self._spares.suspend(replica, self._report)

    def on_step(self, step: Step) -> dict[str, float]:
        advice, metrics = self._advice(step)
        if self._spares is None:
            return metrics
        return metrics | self.scale(0 if step.last else advice, step.number)

    def _advice(self, step: Step) -> tuple[int, dict[str, float]]:
        ahead = None if step.reply is None else step.reply.metrics.get(names.AHEAD_S)
        # None: rollout stands still while the actor trains
        if ahead is None or not (step.seconds > 0 and step.replicas):
            return 0, {}
        if step.replicas != self._replicas:
            self._settling, self._replicas = SETTLING if self._replicas else 0, step.replicas
            self._seen.clear()
        if self._settling:
            self._settling -= 1
        else:
            self._seen.append((max(0.0, step.seconds - ahead), max(0.0, step.seconds - step.wait_s)))
        generated, trained = map(median, zip(*self._seen, strict=True)) if self._seen else (0.0, 0.0)
        advice = advise(generated, trained, step.replicas) if len(self._seen) == WINDOW else 0
        advice = advice if self._least <= step.replicas + advice <= self._most else 0
        return advice, {names.BEHIND_S: generated - trained, names.REPLICA_ADVICE: float(advice)}

    def scale(self, advice: int, version: int) -> dict[str, float]:
        """Carry out an advice under the published policy ``version``, which is the actor's; return metrics. Report a
        changed number of replicas to the coordinator, also if one died or a new one serves."""
        assert self._spares is not None
        serving = self._servers.get_replicas()
        if len(serving) != self._reported:
            self._report()
        metrics = {names.REPLICAS_SERVING: float(len(serving))}
        began = time.monotonic()
        if advice > 0 and len(serving) + self._spares.missing < self._most:  # starting replicas count
            replica = self._spares.wake_up(version)
            if replica is None:  # none rests: one is starting, or none may start
                return metrics
            self._report()
        elif advice < 0 and len(serving) > self._least:
            replica = serving[-1]
            metrics[names.REPLICA_MOVES] = float(self._spares.suspend(replica, self._report))
        else:
            return metrics
        metrics[names.REPLICA_CHANGE_S] = time.monotonic() - began
        logger.info(
            "replica %d %s; %d of %d serve now",
            replica.replica_rank,
            "serves again" if advice > 0 else "rests",
            self._reported,
            self._launched,
        )
        return metrics

    def _report(self, leaves: str = "") -> int:
        self._reported = len(self._servers.get_replicas())
        return self._driver.serve(self._reported / self._launched, leaves)
