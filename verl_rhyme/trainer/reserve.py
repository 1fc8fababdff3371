"""Replicas that rest while generation is ahead of training, and return when it falls behind.

The elastic rule's advice (:mod:`~verl_rhyme.trainer.balance`) is carried out between two steps, when the actor's
weights are those of the policy that was just published: a replica that returns gets them like one that was started in
the place of a dead one, and is admitted to the router after that. One that goes leaves the router first; what runs
there goes on at others with the tokens it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from verl_rhyme.config import CONFIG_PATH, ConfigError, ElasticConfig
from verl_rhyme.coordinator.replicas import Spares, obstacle
from verl_rhyme.observability import metrics as names
from verl_rhyme.planning.elastic import Limits
from verl_rhyme.planning.roster import Change, Roster
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
        roster: Who serves and who rests.
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
        self._launched = self._told = len(replicas)
        try:
            least = config.min_replicas or 1
            self.roster = Roster([replica.replica_rank for replica in replicas], least, config.max_replicas)
        except ValueError as error:
            raise ConfigError(f"{CONFIG_PATH}.streaming.elastic: {error}; lower min_replicas") from None
        self.balance = Balance(setting, self.roster, Limits(least, self.roster.most))

    def begin(self, driver: Driver) -> None:
        """Those that are not to serve at the start go to rest; the coordinator is open."""
        self._driver = driver
        for replica in self._by_rank(self.roster.resting):
            self._rest(replica)

    def on_step(self, step: Step) -> dict[str, float]:
        """Carry out what the balance advises; not after the last step.

        Raises:
            ReplicaDied: One that was to return did not get its weights.
        """
        assert step.reply is not None
        self.observe(step.reply.paces)
        metrics = self.balance.on_step(step)
        return metrics | self.act(0 if step.last else self.balance.advice, step.number)

    def observe(self, paces: Mapping[int, float]) -> None:
        """A step ended, in which a token of a request took so many seconds, by the replica's rank."""
        servers, resting = self._servers.get_replicas(), self._spares.resting
        if len(servers) != self._told:  # one died, or serves that had to be started
            self._tell()
        self.roster.look([r.replica_rank for r in servers], [r.replica_rank for r in resting])
        self.roster.paced(paces)

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
        told = {names.STREAM_REPLICAS: float(len(self.roster.serving))}
        began = time.monotonic()
        change = self.roster.wants(advice)
        if change is not None and change.serves and not self._room():  # those that are being started will serve, too
            return told
        if change is not None and not change.serves:
            [replica] = self._by_rank([change.replica])
            told[names.STREAM_MOVED] = float(self._rest(replica))
        elif change is not None or (advice > 0 and self._spares.vacant and self._room()):
            replica = self._spares.wake(version, next(iter(self._by_rank([change.replica])), None) if change else None)
            if replica is None:  # it is being started
                return told
            self._tell()
        else:
            return told
        told[names.STREAM_CHANGE] = time.monotonic() - began
        self._log(change, replica, told[names.STREAM_CHANGE])
        self.observe({})
        return told

    # ---- within ----

    def _room(self) -> bool:
        return len(self.roster.serving) + self._spares.missing < self.roster.most

    def _by_rank(self, ranks: list[int]) -> list[Any]:
        known = {r.replica_rank: r for r in [*self._servers.get_replicas(), *self._spares.resting]}
        return [known[rank] for rank in ranks if rank in known]

    def _rest(self, replica: Any) -> int:
        return self._spares.rest(replica, lambda address: self._tell(address))

    def _tell(self, leaves: str = "") -> int:
        self._told = len(self._servers.get_replicas())
        return self._driver.serve(Serving(self._told / self._launched, self._slots()), leaves)

    def _log(self, change: Change | None, replica: Any, seconds: float) -> None:
        what = "rests" if change is not None and not change.serves else "serves again"
        count = len(self._servers.get_replicas())
        logger.info(
            "replica %d %s, %d of %d serve now (%.1f s)", replica.replica_rank, what, count, self._launched, seconds
        )
