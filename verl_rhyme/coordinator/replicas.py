"""Rollout replicas that come and go: others in the place of those that died (:mod:`verl_rhyme.processes.deaths`), and
those that rest for a while."""

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

from verl_rhyme.coordinator.replica_start import Start, end
from verl_rhyme.observability.errors import last_line
from verl_rhyme.processes import background
from verl_rhyme.processes.deaths import ReplicaDied, dead, watched
from verl_rhyme.weights.folder import WeightsError
from verl_rhyme.weights.kept_group import KeptGroupManager
from verl_rhyme.weights.manager import RelayManager

logger = logging.getLogger(__name__)

#: Seconds that servers of engines that hang have to hand back what these have said.
_LET_GO_S = 5.0
#: Seconds that a server has to tell its capacity, and to go to rest once nothing runs there.
_ANSWER_S, _REST_S = 60.0, 120.0
#: Seconds for which replicas are started anew where none is left; between two tries, which grow, and the longest.
_NONE_LEFT_S, _PAUSE_S, _LONGEST_PAUSE_S = 300.0, 2.0, 600.0


def serve(servers: Any) -> None:
    """Living replicas that a client has taken for dead are in service again.

    Args:
        servers: verl's ``LLMServerManager`` of them.
    """
    router = servers.global_load_balancer
    known = set(ray.get(router.get_all_servers.remote()))
    all_of_them = zip(servers.server_addresses, servers.server_handles, strict=True)
    if missing := {address: handle for address, handle in all_of_them if address not in known}:
        _admit(router, missing)


def _admit(router: Any, servers: dict[str, Any]) -> None:
    """Into service; a router of ours is told what fits into the KV caches of these as well."""
    ray.get(router.add_servers.remote(servers))
    report: Any = getattr(router, "report_capacity", None)
    for address, server in servers.items() if report else ():
        with suppress(RayError):  # it died just now, as the next look finds
            if tokens := ray.get(server.cache_tokens.remote(), timeout=_ANSWER_S):
                report.remote(address, tokens)


def obstacle(engine: Any, workers: int) -> str:
    """Why weights cannot be sent to a new replica alone; empty when they can.

    Args:
        engine: verl's ``CheckpointEngineConfig``.
        workers: Of a replica.
    """
    backend = engine.backend
    if backend == "kimi_ckpt_engine":
        return f"checkpoint_engine.backend={backend} keeps the process group of the first weight sync"
    if backend == "delta_sharded":
        return f"checkpoint_engine.backend={backend} sends what changed since the last weight sync only"
    if backend == "nixl" and workers == 1:
        return f"checkpoint_engine.backend={backend} cannot send to a replica of one GPU alone"
    return ""


class Spares:
    """Puts others in the place of dead replicas among those that have devices of their own: such as rest, or new ones.

    New ones start beside those that serve, and nobody waits for them; a later :meth:`mend` gives them their weights and
    lets them in. What could not be started is tried again, after pauses that grow.

    A replica that rests keeps its processes and its place in Ray; it gets no requests and no weights, and gives the
    memory of its devices back where its engine can. Before it serves again it gets the current weights, as a new one
    does.

    Args:
        servers: verl's ``LLMServerManager`` of them.
        weights: verl's ``CheckpointEngineManager`` of them.
        hung_s: Seconds without an answer after which one is taken for dead; ``None``: five minutes.
    """

    def __init__(self, servers: Any, weights: Any, hung_s: float | None = None) -> None:
        self._servers, self._weights, self._hung_s = servers, weights, hung_s
        # A new name for each one's actors: Ray may know those of dead ones for a while.
        self._ranks = itertools.count(1 + max(replica.replica_rank for replica in servers.rollout_replicas))
        self._nodes = max(replica.nnodes for replica in servers.rollout_replicas)
        #: How many are to serve again, those that are being started among them.
        self.missing = 0
        self._failures = 0
        self._starts: list[Start] = []
        self._retry_at = 0.0
        self._looking: Future[dict[Any, str]] | None = None
        #: Replicas that were started in the place of dead ones.
        self.started = 0
        #: Those that rest.
        self.resting: list[Any] = []
        #: How many more could be started: those that rested took the places of as many that died.
        self.vacant = 0

    def mend(self, version: int, waits: bool = True) -> int:
        """Take dead replicas out of service, start as many, and let those that are up serve with the actor's weights.

        Where none is left it waits for the first.

        Args:
            version: Of the policy whose weights the actor has.
            waits: Ask replicas now whether they live, and wait for their answers; else those are dead that were found
                to be since the last such call.

        Returns:
            How many had died.

        Raises:
            ReplicaDied: None is left, and none could be started, some time long; a new one did not get its weights (by
                the relay another is started), or cannot (:func:`obstacle`).
            WeightsError: The relay has lost them.
        """
        manager = self._servers
        gone = dead(manager.rollout_replicas, self._hung_s) if waits else self._seen()
        for replica, why in gone.items():
            logger.warning("replica %d (%s) is gone: %s", replica.replica_rank, replica._server_address, why)
        if gone:
            if why := obstacle(self._weights.config, len(manager.rollout_replicas[0].workers)):
                first = next(iter(gone))
                raise ReplicaDied(
                    f"rollout replica {first.replica_rank} died ({gone[first]}) and cannot be replaced: {why}\n"
                    "The same command goes on from the last checkpoint."
                )
            router = manager.global_load_balancer
            ray.get(router.remove_servers.remote([replica._server_address for replica in gone]))
            self._set([replica for replica in manager.rollout_replicas if replica not in gone])
            _let_go(gone)
            for replica in gone:
                end(replica)
            self.missing += len(gone)
        serve(manager)
        if gone:
            self._retry_at = 0.0  # they held devices
        if self.missing:
            self._fill(version)
        return len(gone)

    def _seen(self) -> dict[Any, str]:
        """Who was found dead, and why; the next look begins in the background."""
        if self._looking is not None and not self._looking.done():
            return {}
        serving, looking = list(self._servers.rollout_replicas), self._looking
        self._looking = background.begin(dead, serving, self._hung_s)
        return {} if looking is None else {each: why for each, why in looking.result().items() if each in serving}

    def rest(self, replica: Any, vacate: Callable[[str], int]) -> int:
        """Let one that serves rest.

        Args:
            replica: The one; not the last.
            vacate: Has what runs at an address go on elsewhere.

        Returns:
            How many samples go on elsewhere.
        """
        manager = self._servers
        address = replica._server_address
        self._set([each for each in manager.rollout_replicas if each is not replica])
        self.resting.append(replica)
        ray.get(manager.global_load_balancer.remove_servers.remote([address]))
        moved = vacate(address)
        try:
            if isinstance(self._weights, RelayManager):
                self._weights.part_with(replica)
            ray.get([server.rest.remote() for server in replica.servers], timeout=_REST_S)
        except (RayError, WeightsError) as error:  # it has no requests any more: whoever wakes it finds out
            logger.warning("replica %d does not go to rest as it should: %s", replica.replica_rank, last_line(error))
        return moved

    def wake(self, version: int) -> Any:
        """Let one that rests serve again, with the actor's weights, which are ``version``'s; where none rests, a
        new one in the place of one that died.

        Returns:
            It; ``None``: a new one is being started, which a later :meth:`mend` lets in, or there is no place for one.

        Raises:
            ReplicaDied: It did not get its weights.
        """
        replica = self.resting.pop(0) if self.resting else None
        if replica is not None and (gone := dead([replica])):
            logger.warning("replica %d, which rested, is gone: %s", replica.replica_rank, gone[replica])
            end(replica)
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
        """Let those serve that are up, and start what else is owed; where none serves, wait for one."""
        while self.missing > len(self._starts) and self.resting:
            self.missing, self.vacant = self.missing - 1, self.vacant + 1
            self.wake(version)
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
            late = not serving and spent >= _NONE_LEFT_S  # what is being started may be up any moment all the same
            if late and not self._starts:
                raise ReplicaDied(
                    f"no rollout replica is left, and none could be started in {spent:.0f} s: {why}\nThe same command "
                    "goes on from the last checkpoint."
                ) from why
            if time.monotonic() >= self._retry_at and not late:
                self._start()
            if serving:
                return
            wait([start.up for start in self._starts], timeout=_PAUSE_S, return_when=FIRST_COMPLETED)
            if not self._starts:
                time.sleep(_PAUSE_S)

    def _start(self) -> None:
        """What is owed. Ray gives a replica one node's devices after another's: of two that span nodes and begin
        together each may hold what the other one lacks, so that they begin one by one.
        """
        while self.missing > len(self._starts):
            if self._nodes > 1 and not all(start.seated() for start in self._starts):
                return
            self._starts.append(Start(self._new))

    def _new(self) -> Any:
        manager = self._servers
        return manager.rollout_replica_class(
            replica_rank=next(self._ranks),
            config=manager.rollout_config,
            model_config=manager.model_config,
            gpus_per_node=manager.rollout_config.n_gpus_per_node,
        )

    def _let_in(self, version: int) -> Exception | None:
        """Those that are up serve from now on; what became of the last that will not be."""
        failed: Exception | None = None
        for start in list(self._starts):
            try:
                start.check()
                if not start.up.done():
                    continue
                new = start.up.result()
                try:
                    if gone := dead([new], self._hung_s):  # since it was up; weights that fail would end the run
                        raise RuntimeError(f"replica {new.replica_rank} died before it served: {gone[new]}")
                    self._send(new, version)
                except BaseException:
                    end(new)
                    raise
            except (ReplicaDied, WeightsError):
                raise
            except Exception as error:
                self._starts.remove(start)
                failed = error
                continue
            self._starts.remove(start)
            self._enter(new)
            self.missing, self._failures, self.started = self.missing - 1, 0, self.started + 1
            logger.warning("replica %d takes the place of a dead one", new.replica_rank)
        return failed

    def _put_off(self, error: Exception, alone: bool) -> None:
        """The next try to start one; ``alone``: none serves."""
        self._failures += 1
        pause = _PAUSE_S if alone else min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** min(self._failures, 30))
        self._retry_at = time.monotonic() + pause
        logger.warning(
            "%d replicas are missing, the next try to start one is in %.0f s: %s", self.missing, pause, error
        )

    def _send(self, new: Any, version: int) -> None:
        """The actor's weights, once: after a failure it may be in the midst of sending."""
        if isinstance(self._weights, RelayManager):  # the actor has nothing to do with it: another one may be started
            with watched([new]):
                self._weights.deliver([new])
            return
        try:
            with watched([new]):
                if isinstance(self._weights, KeptGroupManager):
                    self._weights.send([new], version)
                else:
                    CheckpointEngineManager(self._weights.config, self._weights.actor_wg, [new]).update_weights(version)
        except Exception as error:
            raise ReplicaDied(
                f"rollout replica {new.replica_rank}, which is to serve from now on, did not get its weights: {error}\n"
                "The same command goes on from the last checkpoint."
            ) from error

    def _set(self, replicas: list[Any]) -> None:
        manager = self._servers
        manager.rollout_replicas = replicas
        manager.server_handles = [replica._server_handle for replica in replicas]
        manager.server_addresses = [replica._server_address for replica in replicas]
        self._weights.replicas = list(replicas)


def _let_go(replicas: Iterable[Any]) -> None:
    """What they have said is not lost where their servers still answer."""
    servers = [server for replica in replicas for server in replica.servers]
    if asked := [server.let_go.remote() for server in servers if hasattr(server, "let_go")]:
        ray.wait(asked, num_returns=len(asked), timeout=_LET_GO_S)
