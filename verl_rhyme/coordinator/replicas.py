"""Replacement of dead rollout replicas (:mod:`verl_rhyme.processes.deaths`), and replicas that rest."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from verl.checkpoint_engine import CheckpointEngineManager

from verl_rhyme.coordinator.replica_start import ReplicaStart, kill_replica
from verl_rhyme.observability.errors import last_line
from verl_rhyme.processes import background
from verl_rhyme.processes.deaths import ReplicaDied, dead, watched
from verl_rhyme.processes.waiting import waiting_for
from verl_rhyme.weights.folder import WeightsError
from verl_rhyme.weights.manager import RelayManager, compare_replicas
from verl_rhyme.weights.process_group import ProcessGroupManager

logger = logging.getLogger(__name__)

#: Lines of the log that ``benchmarks.faults`` counts.
GONE, REPLACED = "replica %d (%s) is dead: %s", "replica %d replaces a dead one"

#: Seconds that servers of hung engines have to return the tokens generated so far.
_LET_GO_S = 5.0
#: Seconds that a server has to report its capacity, and to rest once no request runs.
_ANSWER_S, _REST_S = 60.0, 120.0
#: Seconds for which starts are retried when no replica is left; the first pause between two tries, and the longest.
_NONE_LEFT_S, _PAUSE_S, _LONGEST_PAUSE_S = 300.0, 2.0, 600.0


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


def single_transfer_obstacle(engine: Any, workers: int) -> str:
    """Return why verl's ``CheckpointEngineConfig`` cannot send weights to a single new replica of so many workers;
    empty if it can."""
    backend = engine.backend
    if backend == "kimi_ckpt_engine":
        return f"checkpoint_engine.backend={backend} keeps the process group of the first weight transfer"
    if backend == "delta_sharded":
        return f"checkpoint_engine.backend={backend} sends only the changes since the last weight transfer"
    if backend == "nixl" and workers == 1:
        return f"checkpoint_engine.backend={backend} cannot send weights to a single replica of one GPU"
    return ""


class SpareReplicas:
    """Replaces dead replicas of separate (disaggregated) engines by resting or new ones, and lets replicas rest.

    New replicas start while others serve, and no call waits for them. A later :meth:`replace_dead` sends them their
    weights and adds them to the router. A failed start is retried, after growing pauses. A resting replica keeps its
    processes and its placement in Ray. It gets no requests and no weights, and frees its device memory where its engine
    can. Like a new replica, it gets the current weights before it serves again.
    """

    def __init__(self, servers: Any, weights: Any, hung_s: float | None = None) -> None:
        # verl's LLMServerManager, and the CheckpointEngineManager of the same replicas
        self._servers, self._weights, self._hung_s = servers, weights, hung_s
        # Fresh ranks give fresh actor names: Ray may know those of dead replicas for a while.
        self._ranks = itertools.count(1 + max(replica.replica_rank for replica in servers.rollout_replicas))
        self._nodes = max(replica.nnodes for replica in servers.rollout_replicas)
        self.missing = 0  # replicas to add, including those that are starting
        self._failures = 0
        self._starts: list[ReplicaStart] = []
        self._retry_at = 0.0
        self._looking: Future[dict[Any, str]] | None = None
        self.resting: list[Any] = []
        self.vacant = 0  # further replicas that may start: resting ones replaced as many dead ones

    def replace_dead(self, version: int, waits: bool = True) -> int:
        """Remove dead replicas, start as many, and let those that are up serve with the actor's weights, of policy
        ``version``. If no replica is left, wait for the first. Return the number of replicas that had died.

        Without ``waits``, use the answers to queries that the last such call began. Raise :class:`ReplicaDied` if no
        replica is left and none could be started in time, or a new one did not get its weights (with the relay, another
        is started) or cannot get them (:func:`single_transfer_obstacle`); ``WeightsError`` if the relay has lost them.
        """
        manager = self._servers
        gone = dead(manager.rollout_replicas, self._hung_s) if waits else self._seen()
        for replica, why in gone.items():
            logger.warning(GONE, replica.replica_rank, replica._server_address, why)
        if gone:
            if why := single_transfer_obstacle(self._weights.config, len(manager.rollout_replicas[0].workers)):
                first = next(iter(gone))
                raise ReplicaDied(
                    f"rollout replica {first.replica_rank} died ({gone[first]}) and cannot be replaced: {why}\n"
                    "The same command continues from the last checkpoint."
                )
            router = manager.global_load_balancer
            with waiting_for("the router"):
                ray.get(router.remove_servers.remote([replica._server_address for replica in gone]))
            self._set([replica for replica in manager.rollout_replicas if replica not in gone])
            _let_go(gone)
            for replica in gone:
                kill_replica(replica)
            self.missing += len(gone)
        readmit(manager)
        if gone:
            self._retry_at = 0.0  # their devices are free now
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
            if isinstance(self._weights, RelayManager):
                self._weights.release(replica)
            ray.get([server.suspend.remote() for server in replica.servers], timeout=_REST_S)
        except (RayError, WeightsError) as error:  # it has no requests left; wake_up() checks whether it lives
            logger.warning("replica %d could not rest: %s", replica.replica_rank, last_line(error))
        return moved

    def wake_up(self, version: int) -> Any:
        """Let a resting replica serve again, with the actor's weights, and return it. If none rests, start one for one
        that died and return ``None``: a later :meth:`replace_dead` adds it. Raise :class:`ReplicaDied` if it did not
        get its weights."""
        replica = self.resting.pop(0) if self.resting else None
        if replica is not None and (gone := dead([replica])):
            logger.warning("resting replica %d is dead: %s", replica.replica_rank, gone[replica])
            kill_replica(replica)
            replica, self.vacant = None, self.vacant + 1
        if replica is None:
            if not self.vacant:
                return None
            self.vacant, self.missing = self.vacant - 1, self.missing + 1
            self._fill(version)
            return None
        self._send(replica, version)
        self._enter(replica)
        return replica

    def _enter(self, replica: Any) -> None:
        self._set([*self._servers.rollout_replicas, replica])
        _admit(self._servers.global_load_balancer, {replica._server_address: replica._server_handle})

    def _fill(self, version: int) -> None:
        """Let replicas that are up serve, and start the missing ones; if none serves, wait for one."""
        while self.missing > len(self._starts) and self.resting:
            self.missing, self.vacant = self.missing - 1, self.vacant + 1
            self.wake_up(version)
        began = time.monotonic()
        if not self._servers.rollout_replicas:
            self._retry_at = 0.0
        why: Exception | None = None
        while True:
            error = self._let_in(version)
            serving, spent = self._servers.rollout_replicas, time.monotonic() - began
            if error is not None:
                why = error
                self._put_off(error, alone=not serving)
            late = not serving and spent >= _NONE_LEFT_S  # replicas that are starting may still come up
            if late and not self._starts:
                raise ReplicaDied(
                    f"no rollout replica is left, and none could be started in {spent:.0f} s: {why}\nThe same command "
                    "continues from the last checkpoint."
                ) from why
            if time.monotonic() >= self._retry_at and not late:
                self._start()
            if serving:
                return
            wait([start.up for start in self._starts], timeout=_PAUSE_S, return_when=FIRST_COMPLETED)
            if not self._starts:
                time.sleep(_PAUSE_S)

    def _start(self) -> None:
        """Start the missing replicas; those that span nodes one by one, because Ray reserves devices node by node: two
        that start together could each hold devices that the other lacks."""
        while self.missing > len(self._starts):
            if self._nodes > 1 and not all(start.has_devices() for start in self._starts):
                return
            self._starts.append(ReplicaStart(self._new))

    def _new(self) -> Any:
        manager = self._servers
        return manager.rollout_replica_class(
            replica_rank=next(self._ranks),
            config=manager.rollout_config,
            model_config=manager.model_config,
            gpus_per_node=manager.rollout_config.n_gpus_per_node,
        )

    def _let_in(self, version: int) -> Exception | None:
        """Let replicas that are up serve; return the error of the last one that failed."""
        failed: Exception | None = None
        for start in list(self._starts):
            try:
                start.check()
                if not start.up.done():
                    continue
                new = start.up.result()
                try:
                    if gone := dead([new], self._hung_s):  # checked first: a failed weight transfer would end the run
                        raise RuntimeError(f"replica {new.replica_rank} died before it served: {gone[new]}")
                    self._send(new, version)
                except BaseException:
                    kill_replica(new)
                    raise
            except (ReplicaDied, WeightsError):
                raise
            except Exception as error:
                self._starts.remove(start)
                failed = error
                continue
            self._starts.remove(start)
            self._enter(new)
            self.missing, self._failures = self.missing - 1, 0
            logger.warning(REPLACED, new.replica_rank)
        return failed

    def _put_off(self, error: Exception, alone: bool) -> None:
        self._failures += 1
        pause = _PAUSE_S if alone else min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(self._failures, 30))
        self._retry_at = time.monotonic() + pause
        logger.warning(
            "%d replicas are missing; the next try to start one is in %.0f s: %s", self.missing, pause, error
        )

    def _send(self, new: Any, version: int) -> None:
        """Send the actor's weights once: after a failure the actor may still be sending."""
        if isinstance(self._weights, RelayManager):  # not sent by the actor: after a failure another can start
            with watched([new]), waiting_for("the weights to reach a new replica"):
                self._weights.deliver([new])
            return
        try:
            with watched([new]), waiting_for("the weights to reach a new replica"):
                if isinstance(self._weights, ProcessGroupManager):
                    self._weights.send([new], version)
                else:
                    CheckpointEngineManager(self._weights.config, self._weights.actor_wg, [new]).update_weights(version)
                compare_replicas(self._weights.actor_wg, [new])
        except WeightsError:
            raise
        except Exception as error:
            raise ReplicaDied(
                f"rollout replica {new.replica_rank} did not get its weights before it served: {error}\n"
                "The same command continues from the last checkpoint."
            ) from error

    def _set(self, replicas: list[Any]) -> None:
        manager = self._servers
        manager.rollout_replicas = replicas
        manager.server_handles = [replica._server_handle for replica in replicas]
        manager.server_addresses = [replica._server_address for replica in replicas]
        self._weights.replicas = list(replicas)


def _let_go(replicas: Iterable[Any]) -> None:
    """Ask servers that still answer to return the tokens generated so far."""
    servers = [server for replica in replicas for server in replica.servers]
    if pending := [s.return_partial_responses.remote() for s in servers if hasattr(s, "return_partial_responses")]:
        ray.wait(pending, num_returns=len(pending), timeout=_LET_GO_S)
