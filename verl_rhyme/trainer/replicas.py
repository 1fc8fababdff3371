"""Replacement of dead rollout replicas (:mod:`verl_rhyme.processes.deaths`), and replicas that rest."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_placement_group, remove_placement_group

from verl_rhyme.config.backends import backend
from verl_rhyme.observability.errors import last_line
from verl_rhyme.processes import background
from verl_rhyme.processes.deaths import ReplicaDied, dead, watched
from verl_rhyme.processes.waiting import waiting_for
from verl_rhyme.weights.folder import WeightsError

logger = logging.getLogger(__name__)

#: Lines of the log that ``benchmarks.faults`` counts.
GONE, REPLACED = "replica %d (%s) is dead: %s", "replica %d replaces a dead one"

#: Seconds that a server has to report its capacity, or to rest once no request runs.
_ANSWER_S = 120.0
#: Seconds after a failed start until the next: devices of dead processes become free with a delay.
_PAUSE_S = 30.0
#: Seconds for which a run without any replica waits for one, and after which a start is given up; an engine may compile
#: for minutes.
_NONE_LEFT_S, _LOOK_S = 1200.0, 1.0


def readmit(servers: Any) -> None:
    """Return living replicas of verl's ``LLMServerManager`` to service that a client had reported as dead."""
    router = servers.global_load_balancer
    with waiting_for("the router"):
        known = set(ray.get(router.get_all_servers.remote()))
    all_of_them = zip(servers.server_addresses, servers.server_handles, strict=True)
    if missing := {address: handle for address, handle in all_of_them if address not in known}:
        _admit(router, missing)


def _admit(router: Any, servers: dict[str, Any]) -> None:
    with waiting_for("the router"):
        ray.get(router.add_servers.remote(servers))
    report: Any = getattr(router, "report_capacity", None)
    for address, server in servers.items() if report else ():
        with suppress(RayError):  # a server that just died is detected by the next check
            if tokens := ray.get(server.cache_tokens.remote(), timeout=_ANSWER_S):
                report.remote(address, tokens)


def kill_replica(replica: Any) -> None:
    """Kill the actors of a replica and release the devices that it holds or has requested."""
    for actor in [*replica.servers, *replica.workers]:
        ray.kill(actor)
    pool = replica.resource_pool
    if pool is None:
        return
    groups = list(pool.pgs or ())
    if not groups:  # verl sets them only once they are ready
        name = f"{pool.name_prefix}verl_group_{'_'.join(map(str, pool.store))}:"
        for number in range(len(pool.store)):
            with suppress(ValueError):  # no such group
                groups.append(get_placement_group(f"{name}{number}"))
    for group in groups:
        remove_placement_group(group)


class _Start(NamedTuple):
    """A replica that starts in a thread."""

    replica: Any
    up: Future[None]
    began: float

    def is_over(self) -> bool:
        return self.up.done() or time.monotonic() - self.began >= _NONE_LEFT_S

    def has_devices(self) -> bool:
        """Return whether the replica has all its devices, or its start is over."""
        return self.up.done() or bool(getattr(self.replica.resource_pool, "pgs", None))


class SpareReplicas:
    """Replaces dead replicas of separate (disaggregated) engines by resting or new ones, and lets replicas rest.

    New replicas start while others serve, and no call waits for them. A later :meth:`replace_dead` sends them their
    weights and adds them to the router. A resting replica keeps its processes and its placement in Ray. It gets no
    requests and no weights, and frees its device memory where its engine can. Like a new replica, it gets the current
    weights before it serves again.
    """

    def __init__(self, servers: Any, weights: Any, hung_s: float) -> None:
        # verl's LLMServerManager, and the carrier of weights of the same replicas (verl_rhyme.weights.carrier)
        self._servers, self._weights, self._hung_s = servers, weights, hung_s
        # Fresh ranks give fresh actor names: Ray may know those of dead replicas for a while.
        self._ranks = itertools.count(1 + max(replica.replica_rank for replica in servers.rollout_replicas))
        self._nodes = max(replica.nnodes for replica in servers.rollout_replicas)
        self._launched = len(servers.rollout_replicas)
        self.missing = 0  # replicas to add, including those that are starting
        self._starts: list[_Start] = []
        self._retry_at, self._error = 0.0, ""  # of the last failed start
        self._looking: Future[dict[Any, str]] | None = None
        self.resting: list[Any] = []

    def replace_dead(self, version: int, waits: bool = True) -> int:
        """Remove dead replicas, start as many, and let those that are up serve with the actor's weights, of policy
        ``version``. If no replica is left, wait for the first. Return the number of replicas that had died.

        Without ``waits``, use the answers to queries that the last such call began. Raise :class:`ReplicaDied` if no
        replica is left and none could be started in time, or a new one did not get its weights (with the relay, another
        is started) or cannot get them; ``WeightsError`` if the relay has lost them.
        """
        gone = dead(self._servers.rollout_replicas, self._hung_s) if waits else self._seen()
        if gone:
            self._remove(gone)
        readmit(self._servers)
        if self.missing:
            with waiting_for("a rollout replica to serve"):
                self._fill(version)
        return len(gone)

    def _seen(self) -> dict[Any, str]:
        """Return the dead replicas, with reasons, that the last check found; begin the next in the background."""
        if self._looking is not None and not self._looking.done():
            return {}
        serving, looking = list(self._servers.rollout_replicas), self._looking
        self._looking = background.run_in_thread(dead, serving, self._hung_s)
        return {} if looking is None else {each: why for each, why in looking.result().items() if each in serving}

    def _remove(self, gone: dict[Any, str]) -> None:
        serving = self._servers.rollout_replicas
        for replica, why in gone.items():
            logger.warning(GONE, replica.replica_rank, replica._server_address, why)
        if why := backend(self._weights.config.backend).obstacle(len(serving[0].workers)):
            first = next(iter(gone))
            raise ReplicaDied(
                f"rollout replica {first.replica_rank} died ({gone[first]}) and cannot be replaced with "
                f"checkpoint_engine.backend={self._weights.config.backend}: {why}\n"
                "The same command continues from the last checkpoint."
            )
        with waiting_for("the router"):
            ray.get(self._servers.global_load_balancer.remove_servers.remote([each._server_address for each in gone]))
        self._set([replica for replica in serving if replica not in gone])
        for replica in gone:
            kill_replica(replica)
        self.missing += len(gone)
        self._retry_at = 0.0  # their devices are free now

    def suspend(self, replica: Any, drain: Callable[[str], int]) -> int:
        """Let a serving replica rest that is not the last one; ``drain`` moves the samples of its address to other
        replicas. Return their number."""
        manager = self._servers
        address = replica._server_address
        self._set([each for each in manager.rollout_replicas if each is not replica])
        self.resting.append(replica)
        with waiting_for("the router"):
            ray.get(manager.global_load_balancer.remove_servers.remote([address]))
        moved = drain(address)
        try:
            self._weights.release(replica)
            ray.get([server.suspend.remote() for server in replica.servers], timeout=_ANSWER_S)
        except (RayError, WeightsError) as error:  # it has no requests left; wake_up() checks whether it lives
            logger.warning("replica %d could not rest: %s", replica.replica_rank, last_line(error))
        return moved

    def wake_up(self, version: int) -> Any:
        """Let a resting replica serve again, with the actor's weights, and return it. If none rests, start one for one
        that died and return ``None``: a later :meth:`replace_dead` adds it. Raise :class:`ReplicaDied` if it did not
        get its weights."""
        while self.resting:
            replica = self.resting.pop(0)
            if not (gone := dead([replica], self._hung_s)):
                self._send(replica, version)
                self._enter(replica)
                return replica
            logger.warning("resting replica %d is dead: %s", replica.replica_rank, gone[replica])
            kill_replica(replica)
        if len(self._servers.rollout_replicas) + self.missing < self._launched:
            self.missing += 1
            self._fill(version)
        return None

    def _enter(self, replica: Any) -> None:
        self._set([*self._servers.rollout_replicas, replica])
        _admit(self._servers.global_load_balancer, {replica._server_address: replica._server_handle})

    def _fill(self, version: int) -> None:
        """Wake or start the missing replicas, and let those that are up serve; if none serves, wait for one."""
        while self.resting and self.missing > len(self._starts):
            self.missing -= 1
            self.wake_up(version)
        began = time.monotonic()
        while True:
            self._let_in(version)
            if time.monotonic() >= self._retry_at:
                self._start()
            if self._servers.rollout_replicas:
                return
            if time.monotonic() - began >= _NONE_LEFT_S:
                raise ReplicaDied(
                    f"no rollout replica is left, and none could be started in {_NONE_LEFT_S:.0f} s: {self._error}\n"
                    "The same command continues from the last checkpoint."
                )
            time.sleep(_LOOK_S)

    def _start(self) -> None:
        """Start the missing replicas; those that span nodes one by one, because Ray reserves devices node by node: two
        that start together could each hold devices that the other lacks."""
        while self.missing > len(self._starts):
            if self._nodes > 1 and not all(start.has_devices() for start in self._starts):
                return
            manager = self._servers
            new = manager.rollout_replica_class(
                replica_rank=next(self._ranks),
                config=manager.rollout_config,
                model_config=manager.model_config,
                gpus_per_node=manager.rollout_config.n_gpus_per_node,
            )
            self._starts.append(
                _Start(new, background.run_in_thread(asyncio.run, new.init_standalone()), time.monotonic())
            )

    def _let_in(self, version: int) -> None:
        """Let replicas that are up serve; put off the next start after one that failed."""
        for start in [start for start in self._starts if start.is_over()]:
            self._starts.remove(start)
            new = start.replica
            try:
                if not start.up.done():
                    raise TimeoutError(f"replica {new.replica_rank} was not up after {_NONE_LEFT_S:.0f} s")
                start.up.result()
                if gone := dead([new], self._hung_s):  # checked first: a failed weight transfer would end the run
                    raise RuntimeError(f"replica {new.replica_rank} died before it served: {gone[new]}")
                self._send(new, version)
            except Exception as error:
                kill_replica(new)
                if isinstance(error, ReplicaDied | WeightsError):
                    raise
                self._retry_at, self._error = time.monotonic() + _PAUSE_S, str(error)
                logger.warning(
                    "%d replicas are missing; the next try to start one is in %.0f s: %s", self.missing, _PAUSE_S, error
                )
                continue
            self._enter(new)
            self.missing -= 1
            logger.warning(REPLACED, new.replica_rank)

    def _send(self, new: Any, version: int) -> None:
        with watched([new], self._hung_s), waiting_for("the weights to reach a new replica"):
            self._weights.deliver([new], version)

    def _set(self, replicas: list[Any]) -> None:
        manager = self._servers
        manager.rollout_replicas = replicas
        manager.server_handles = [replica._server_handle for replica in replicas]
        manager.server_addresses = [replica._server_address for replica in replicas]
        self._weights.replicas = list(replicas)
